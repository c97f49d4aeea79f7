"""Models with random weights: the config of a head, a shallower one, and the model itself with the head of a task.

Any process can build from a :class:`ModelSpec`, which `resolve` makes of what the user wrote. Weights are never read.

A config says its depth in a few known fields; its lists with an item for each layer are cut along. The caller has to
check that the layers really repeat, by the operators and the number of parameters.
"""

import copy
import functools
import itertools
import math
import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from autotune.errors import InputError, one_line
from autotune.training.facts import facts_of
from autotune.training.inputs import freeze, is_vision, special_ids
from autotune.training.resolve import HEADS, check_task, library_config
from autotune.units import visible
from autotune.values.model import VOCABULARIES, ModelFacts, ModelSpec, Task
from autotune.values.workload import Recipe

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# Errors at what can't be done: torch raises an AssertionError without CUDA, a RuntimeError when memory runs out.
_REFUSALS = (
    ValueError, TypeError, LookupError, AttributeError, NotImplementedError, ImportError, AssertionError,
    ArithmeticError,
)  # fmt: skip

# Fields whose value n makes every n-th layer one of another kind.
_PERIODS = (
    "decoder_sparse_step", "encoder_sparse_step", "sliding_window_pattern", "attn_layer_period", "expert_layer_period",
    "full_attention_interval", "global_attn_every_n_layers", "interleave_moe_layer_step",
)  # fmt: skip

# The number of a layer in a parameter's name.
_LAYER = re.compile(r"\.\d+(?=\.|$)")


def build_config(spec: ModelSpec, task: Task) -> "PreTrainedConfig":
    check_task(spec, task)
    config = library_config(spec)
    if (vocabulary := VOCABULARIES.get(spec.model_type)) is not None:
        config.vocab_size = vocabulary
    config.architectures = config.architectures or []  # which the library iterates over: types with heads, as DeiT
    if task is Task.SEQUENCE_CLASSIFICATION:
        text = config.get_text_config()
        if getattr(text, "pad_token_id", None) is None:  # decoders look for the last token before padding
            text.pad_token_id = config.pad_token_id = next(iter(special_ids(config, "eos_token_id")), 0)
    if task is Task.CAUSAL_LM and spec.kind == "encoder":
        config.is_decoder = True
    return config


def build_model(
    spec: ModelSpec,
    task: Task,
    *,
    dtype: str,  # name of a torch dtype, as "float32" or "bfloat16"
    attn_implementation: str | None = None,
    device: str,  # "meta" allocates nothing
    experts_implementation: str | None = None,
    config: "PreTrainedConfig | None" = None,
    quantization: dict[str, Any] | None = None,  # arguments of `transformers.BitsAndBytesConfig` for linear layers
    distributed_config: dict[str, Any] | None = None,  # arguments of `DistributedConfig`; this rank's part is built
    whole_first: bool = False,  # all of the model on each rank before its part is kept: weights are those of one device
    **figures: int,  # fields of the config to set, such as `num_experts_per_tok`
) -> "PreTrainedModel":
    """Build the model with random weights on the device, ready to train.

    Equal torch seeds give equal weights. Running out of memory is not caught here. The library chooses implementations
    that are None; `config` takes the place of the spec's own, such as a shallower one.
    """
    import torch
    import transformers

    from autotune.training.random_weights import quantize, shard_model, whole_weights

    chosen = {"attn_implementation": attn_implementation, "experts_implementation": experts_implementation}
    options: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    options |= {"dtype": getattr(torch, dtype), "trust_remote_code": spec.trust_remote_code}
    config = copy.deepcopy(config or build_config(spec, task)) if figures else config or build_config(spec, task)
    for name, value in figures.items():
        setattr(config.get_text_config(), name, value)
    head = getattr(transformers, HEADS[task][0])
    try:
        in_parts = distributed_config is not None and not whole_first
        first = "meta" if quantization is not None or in_parts else device
        with whole_weights() if whole_first else nullcontext(), torch.device(first), warnings.catch_warnings():
            # Of a figure that is 0, with which the model doesn't train, as is said where it is traced.
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            model = head.from_config(config, **options)
        # `from_pretrained` trains all that it loads, also what the class itself freezes, such as Whisper's positions.
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        # Wav2Vec2 makes one parameter by torch's legacy constructor, which ignores the device of the context.
        if any(parameter.device.type != torch.device(first).type for parameter in model.parameters()):
            model.to(first)
    except (*_REFUSALS, RuntimeError) as error:
        if not isinstance(error, _REFUSALS) and str(first) != "meta":  # of memory, perhaps
            raise
        raise InputError(f"{visible(spec.name)}: can't be built: {one_line(error)}") from error
    if spec.config.get("tie_word_embeddings") is False:
        # T5's config class forces the tie. A model loaded from a checkpoint with both weights (T5 v1.1, FLAN, mT5,
        # ByT5) has them apart, so one that is made from figures must too.
        inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
        if None not in (inputs, outputs) and outputs.weight is inputs.weight:
            outputs.weight = torch.nn.Parameter(outputs.weight.detach().clone())
            name = next(n for n, module in model.named_modules() if module is outputs)
            model.all_tied_weights_keys.pop(f"{name}.weight", None)
    if quantization is not None:
        quantize(model, quantization, device)
    if distributed_config is not None:
        model = shard_model(model, distributed_config)
    if spec.freeze_vision:
        freeze(model, is_vision)
    if spec.frozen:
        named = "|".join(re.escape(path).replace(r"\*", r"\d+") for path in spec.frozen)
        freeze(model, re.compile(rf"({named})(\.|$)").match)
    return model.train()


def describe(spec: ModelSpec, task: Task, recipe: Recipe | None = None) -> ModelFacts:
    return facts_of(build_model(spec, task, dtype="float32", attn_implementation=None, device="meta"), task, recipe)


def frozen_paths(model: "nn.Module") -> tuple[str, ...]:
    """Return the modules and parameters of `model` that aren't trained; * is the number of every layer if all are."""
    # The modules that hold a parameter, from the outermost to the parameter itself.
    around = {n: list(itertools.accumulate(n.split("."), "{}.{}".format)) for n, _ in model.named_parameters()}
    trained = {path for name, p in model.named_parameters() if p.requires_grad for path in around[name]}
    frozen = (paths for paths in around.values() if paths[-1] not in trained)
    found = dict.fromkeys(next(path for path in paths if path not in trained) for paths in frozen)
    alike: dict[str, list[str]] = {}
    for path in found:
        alike.setdefault(_LAYER.sub(".*", path, count=1), []).append(path)
    named: list[str] = []
    for path, paths in alike.items():
        stack, star, _ = path.partition(".*")
        is_every = star and len(paths) == len(list(model.get_submodule(stack).children()))
        named += [path] if is_every else paths
    return tuple(named)


def frozen_layers(paths: tuple[str, ...]) -> int:
    """Return the number of layers up to the last one that is frozen otherwise than those that follow it."""
    return max((int(found[0][1:]) + 1 for path in paths if (found := _LAYER.search(path))), default=0)


@dataclass(frozen=True)
class Stack:
    """Equal layers, or groups of layers that repeat."""

    field: str
    depth: int
    base: int  # layers of the shallowest model that has every kind of layer
    period: int  # layers after which the kinds repeat

    def deeper(self) -> Self:
        """Return this stack with periods of about six layers, by which the two models that are traced differ."""
        period = self.period * max(1, 6 // self.period)
        return replace(self, base=self.base + (self.depth - self.base) % period, period=period)


def stacks(config: Any, every: int = 1, leading: int = 0) -> tuple[Stack, ...]:
    """Return the stacks of layers of a library config; none if it doesn't say its depth.

    With `every` the period is a multiple of it, such as 2 where every second layer is checkpointed; the first `leading`
    layers aren't like the others. Fields of a config inside are named with it, as "text_config.num_hidden_layers".
    """
    if getattr(config, "image_token_id", None) is None or not hasattr(config, "vision_config"):
        of_both = (("num_layers", "num_decoder_layers"), ("encoder_layers", "decoder_layers"))
        others = (("num_encoder_layers", "num_decoder_layers"), ("num_hidden_layers",))
        said = (names for names in (*of_both, *others) if all(_depth(config, name) for name in names))
        return tuple(_stack(config, name, every, leading) for name in next(said, ()))
    # A language model and the vision part before it, if its layers are alike: Qwen3-VL adds features of some of its
    # vision layers to the language model's first (DeepStack), and some of Qwen2.5-VL's attend beyond their window.
    vision = config.vision_config
    deep = getattr(vision, "deepstack_visual_indexes", None) or ()
    found = {"text_config": _stack(config.text_config, "num_hidden_layers", every, max(leading, len(deep)))}
    if not deep and not getattr(vision, "fullatt_block_indexes", None) and _depth(vision, "num_hidden_layers"):
        stack = _stack(vision, "num_hidden_layers", every, leading)
        # LLaVA takes the features before the last layer: the layer that repeats mustn't be the one that makes them.
        found["vision_config"] = replace(stack, base=stack.base + stack.period)
    return tuple(replace(s, field=f"{part}.{s.field}") for part, s in found.items() if s.depth > s.base)


def shallower(config: Any, depths: dict[str, int]) -> Any:
    config = copy.deepcopy(config)
    for path, depth in depths.items():
        *parts, name = path.split(".")
        part = functools.reduce(getattr, parts, config)
        full = getattr(part, name)
        for key, value in list(vars(part).items()):
            if isinstance(value, list | tuple) and len(value) == full:
                setattr(part, key, value[:depth])
        setattr(part, name, depth)
    return config


def without_chance(config: Any) -> Any:
    """Return a copy of `config` without layer drop and SpecAugment, so that each step is the same."""
    config = copy.deepcopy(config)
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    if hasattr(config, "mask_time_prob"):  # it stays, since at 0 the model would have a parameter less
        config.apply_spec_augment = False
    return config


def _stack(config: Any, name: str, every: int, leading: int) -> Stack:
    depth = int(getattr(config, name))
    leading = max(leading, int(getattr(config, "first_k_dense_replace", 0) or 0))  # DeepSeek's dense layers
    period, kinds = 1, getattr(config, "layer_types", None)
    if kinds and len(kinds) == depth:
        rest = list(kinds[leading:])
        alike = (p for p in range(1, len(rest) + 1) if all(a == b for a, b in zip(rest, rest[p:], strict=False)))
        period = next(alike)
    for field in _PERIODS:
        step = getattr(config, field, None)
        if isinstance(step, int) and step > 1:
            period = max(period, step)
    period = math.lcm(period, every)
    # Two periods, as the first layer differs: T5's holds the position biases, and under LoRA it has no input gradient.
    base = leading + 2 * period
    base += (depth - base) % period  # the layers that are left over come first
    return Stack(field=name, depth=depth, base=base, period=period)


def _depth(config: Any, name: str) -> int:
    value = None if isinstance(getattr(type(config), name, None), property) else getattr(config, name, None)  # derived
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
