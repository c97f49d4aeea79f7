"""Models with random weights: the config of a head, and the model itself with the head of a task.

A :class:`ModelSpec`, which `resolve` makes of what the user wrote, is a value that any process can build from. Weights
are never read.
"""

from __future__ import annotations

import copy
import itertools
import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError, one_line
from autotune.training.facts import facts_of
from autotune.training.inputs import freeze_vision, special_ids
from autotune.training.resolve import HEADS, check_task, library_config, shown
from autotune.values.model import ModelFacts, ModelSpec, Task

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# Errors of the library and torch at a request that they can't fulfil; torch without CUDA raises an AssertionError.
# Out of memory is a RuntimeError.
_REFUSALS = (
    ValueError, TypeError, LookupError, AttributeError, NotImplementedError, ImportError, AssertionError,
    ArithmeticError,
)  # fmt: skip

# The number of a layer in a parameter's name.
_LAYER = re.compile(r"\.\d+(?=\.|$)")


def build_config(spec: ModelSpec, task: Task) -> PreTrainedConfig:
    """Make the library's config for a model and a head.

    Raises:
        InputError: The model has no such head, or the library refuses the figures.
    """
    check_task(spec, task)
    config = library_config(spec)
    if config.architectures is None:
        config.architectures = []  # the library iterates over it where a type has several heads, as DeiT
    if task is Task.SEQUENCE_CLASSIFICATION:
        if not spec.config.keys() & {"num_labels", "id2label"}:
            config.num_labels = 2
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
    dtype: str,
    attn_implementation: str | None = None,
    device: str,
    experts_implementation: str | None = None,
    config: PreTrainedConfig | None = None,
    quantization: dict[str, Any] | None = None,
    distributed_config: dict[str, Any] | None = None,
    whole_first: bool = False,
    **figures: int,
) -> PreTrainedModel:
    """Build the model with random weights on the device, ready to train.

    Equal torch seeds give equal weights. Running out of memory is not caught here.

    Args:
        spec: The model.
        task: The head.
        dtype: Name of a torch dtype, as "float32" or "bfloat16".
        attn_implementation: Attention kernel; None: the library's choice.
        device: Torch device; "meta" allocates nothing.
        experts_implementation: Implementation of experts; None: the library's choice.
        config: Library config in place of the spec's own.
        quantization: Keyword arguments of `transformers.BitsAndBytesConfig` for the weights of linear layers.
        distributed_config: Keyword arguments of transformers' `DistributedConfig`; this rank's part is built.
        whole_first: Build all of the model on each rank before its part is kept: weights are then those of one device.
        figures: Fields of the config to set, such as `num_experts_per_tok`.

    Raises:
        InputError: The library refuses.
    """
    import torch
    import transformers

    from autotune.training.random_weights import whole_weights

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
        with whole_weights() if whole_first else nullcontext(), torch.device(first):
            model = head.from_config(config, **options)
        # Wav2Vec2 makes one parameter by torch's legacy constructor, which ignores the device of the context.
        if any(parameter.device.type != torch.device(first).type for parameter in model.parameters()):
            model.to(first)
    except (*_REFUSALS, RuntimeError) as error:
        if not isinstance(error, _REFUSALS) and str(first) != "meta":  # of memory, perhaps
            raise
        raise InputError(f"{shown(spec.name)}: can't be built: {one_line(error)}") from error
    if spec.config.get("tie_word_embeddings") is False:
        _untie(model)
    if quantization is not None:
        from autotune.training.random_weights import quantize

        quantize(model, quantization, device)
    if distributed_config is not None:
        from autotune.training.random_weights import share_matrices

        model = share_matrices(model, distributed_config)
    if spec.freeze_vision:
        freeze_vision(model)
    if spec.frozen:
        named = "|".join(re.escape(path).replace(r"\*", r"\d+") for path in spec.frozen)
        for name, parameter in model.named_parameters():
            if re.match(rf"({named})(\.|$)", name):
                parameter.requires_grad_(False)
    return model.train()


def describe(spec: ModelSpec, task: Task) -> ModelFacts:
    """Return the facts about a model and its head, without allocating its weights.

    Raises:
        InputError: The model has no such head, or the library refuses.
    """
    model = build_model(spec, task, dtype="float32", attn_implementation=None, device="meta")
    return facts_of(model, task)


def frozen_paths(model: nn.Module) -> tuple[str, ...]:
    """Return what of `model` isn't trained: the modules of which nothing is, and the parameters of the others.

    What is so in every layer is named once, with * for the layer's number.
    """
    parameters = dict(model.named_parameters())
    trained = {path for name, p in parameters.items() if p.requires_grad for path in _paths(name)}
    found = dict.fromkeys(
        next(path for path in _paths(name) if path not in trained)
        for name, p in parameters.items()
        if not p.requires_grad
    )
    alike: dict[str, list[str]] = {}
    for path in found:
        alike.setdefault(_LAYER.sub(".*", path, count=1), []).append(path)
    named: list[str] = []
    for path, paths in alike.items():
        stack, star, _ = path.partition(".*")
        is_every = star and len(paths) == len(list(model.get_submodule(stack).children()))
        named += [path] if is_every else paths
    return tuple(named)


def _paths(name: str) -> list[str]:
    """Return the modules that hold a parameter, from the outermost to the parameter itself."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def _untie(model: PreTrainedModel) -> None:
    """Give the output layer its own weights where the library ties them against the config.

    T5's config class forces the tie. A model loaded from a checkpoint with both weights (T5 v1.1, FLAN, mT5, ByT5) has
    them apart, so one that is made from figures must too.
    """
    import torch

    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is None or inputs is None or outputs.weight is not inputs.weight:
        return
    outputs.weight = torch.nn.Parameter(outputs.weight.detach().clone())
    name = next(n for n, module in model.named_modules() if module is outputs)
    model.all_tied_weights_keys.pop(f"{name}.weight", None)


def without_chance(config: Any) -> Any:
    """Return a copy of `config` without layer drop and SpecAugment, so that each step is the same."""
    config = copy.deepcopy(config)
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    if hasattr(config, "mask_time_prob"):  # it stays, since at 0 the model would have a parameter less
        config.apply_spec_augment = False
    return config
