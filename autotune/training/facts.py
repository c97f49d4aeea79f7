"""Facts about a built model and its head: their abilities on one device and on several.

The model may be on the meta device: nothing is computed, only classes, modules and the config are looked at. Whether
this machine has what a kernel needs is not asked here.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import json
import math
from typing import TYPE_CHECKING, Any

from autotune.training.inputs import IMAGES, is_vision
from autotune.values.model import EXPERTS_IMPLEMENTATIONS, ModelFacts, Task
from autotune.values.techniques import why_not
from autotune.values.workload import Recipe

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

# Shares of a recording that SpecAugment (arXiv:1904.08779) hides, as transformers' speech models call them.
_HIDDEN_PARTS = ("mask_time_prob", "mask_feature_prob")
# Fields of a config that say nothing of the architecture: names (labels' number counts), author, what a trial sets.
_NAMING = {
    "_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype", "id2label",
    "label2id",
}  # fmt: skip
# Model types whose attention stays within the samples of a packed row if positions start anew and no mask is given, as
# a test with tiny models sees (transformers 5.23). In OPT, BLOOM, Falcon, gpt-oss and Mamba samples see each other.
PACKED = {
    "cohere", "deepseek_v2", "deepseek_v3", "gemma", "gemma3_text", "glm", "gpt2", "gpt_neox", "granite", "llama",
    "mistral", "mixtral", "olmo", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "smollm3", "stablelm", "starcoder2",
}  # fmt: skip


def facts_of(model: PreTrainedModel, task: Task, recipe: Recipe | None = None) -> ModelFacts:
    import torch
    from transformers.modeling_layers import GradientCheckpointingLayer

    from autotune.training.loss import loss_shifts

    config, experts, model_type = model.config.get_text_config(), experts_of(model.config), model.config.model_type
    has_several = experts and model._can_set_experts_implementation()  # otherwise the class has only its own
    every = dict.fromkeys((config._experts_implementation, *EXPERTS_IMPLEMENTATIONS)) if has_several else ()
    implementations = tuple(kind for kind in every if why_not("experts_implementation", kind) is None)
    # peft's prefixes fit if the head passes a cache on (`cache` since transformers 5.24, not found by peft 0.21 in
    # classifiers), and its heads make up the hidden size, as those of larger T5s don't: peft reshapes by `d_model`.
    caches = {"past_key_values"} | ({"cache"} if task is not Task.SEQUENCE_CLASSIFICATION else set())
    passes_cache = bool(caches & inspect.signature(type(model).forward).parameters.keys())
    width = getattr(config, "d_kv", None)
    figures = [type(model).__name__, model.config.num_labels, _figures(model.config.to_dict())]
    written = json.dumps(figures, sort_keys=True, default=str)
    has_liger = False
    with contextlib.suppress(ImportError, RuntimeError):  # without it, without Triton, or without a device for that
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        has_liger = model_type in MODEL_TYPE_TO_APPLY_LIGER_FN
    shifts = loss_shifts(model)
    # The loss can come in chunks if it is the library's, of what a linear head makes, and nothing bends its logits.
    caps = [name for name in vars(config) if "logit" in name and "soft" in name and "attn" not in name]
    is_linear = task is Task.CAUSAL_LM and type(model.get_output_embeddings()) is torch.nn.Linear
    chunks = is_linear and shifts and not any(getattr(config, name) for name in caps)
    # Heads that the class's plan of tensor parallelism can divide among devices; some configs have a list, one a layer.
    heads, keys = (_of_all_layers(config, f"num_{name}_heads") for name in ("attention", "key_value"))
    if not isinstance(heads, int) or not getattr(model, "_tp_plan", None):
        heads = None
    elif isinstance(keys, int) and keys:
        heads = math.gcd(heads, keys)
    of_experts = (name for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name)
    return ModelFacts(
        task=task,
        parameters=sum(p.numel() for p in model.parameters()),
        frozen_parameters=sum(p.numel() for p in model.parameters() if not p.requires_grad),
        attn_implementations=_attention(model),
        supports_checkpointing=bool(model.supports_gradient_checkpointing),
        layers=sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules()) or None,
        experts=experts,
        experts_implementations=implementations,
        experts_per_token=_of_all_layers(config, "num_experts_per_tok") if experts else None,
        expert_capacity=getattr(config, "expert_capacity", None) if experts else None,
        liger=has_liger,
        batch_coupled=_coupling(model, config, by_trl=recipe is not None and task is Task.CAUSAL_LM),
        split_changes=recipe.kind.coupled if recipe is not None else None,
        has_dropout=_has_dropout(model, config),
        shifts_labels=shifts,
        chunks_loss=chunks,
        packs=task is Task.CAUSAL_LM and model_type in PACKED,
        max_sequence_length=_positions(model, config) if task.takes_text else None,
        max_target_length=getattr(config, "max_target_positions", None) if task is Task.SPEECH_SEQ2SEQ else None,
        linear_modules=_linear_modules(model),
        biases=sum(p.numel() for name, p in model.base_model.named_parameters() if name.endswith("bias")),
        expert_parameters=tuple(dict.fromkeys(".".join(name.split(".")[-2:]) for name in of_experts)),
        takes_prefix=passes_cache and (width is None or width * config.num_heads == config.d_model),
        not_fsdp=_fsdp_conflict(model),
        has_self_attn=any(name.endswith("self_attn") for name, _ in model.named_modules()),
        counts_keys=keys is not None,
        tensor_parallel_heads=heads,
        architecture=hashlib.sha256(written.encode()).hexdigest()[:16],
    )


def _of_all_layers(config: Any, name: str) -> Any:
    """Return a figure of a config; None: it has none, or layers differ in it, so that transformers refuses to tell."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return getattr(config, name)
    return None


def _figures(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config, and the configs within it, without the fields in `_NAMING`."""
    return {n: _figures(value) if isinstance(value, dict) else value for n, value in config.items() if n not in _NAMING}


def experts_of(config: PreTrainedConfig) -> int:
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = max((int(getattr(text, name, None) or 0) for name in names), default=0)
    return found if found > 1 else 0


def _attention(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the kernels that the class's flags name; none for a model without attention (ResNet, Mamba)."""
    if not any("attention" in type(module).__name__.lower() for module in model.modules()):
        return ()
    kernels = ["eager"]
    if model._supports_sdpa:
        kernels.append("sdpa")
    if model._supports_flash_attn:
        allowed = getattr(model, "_compatible_flash_implementations", None)
        kernels += [k for k in ("flash_attention_2", "flash_attention_3") if allowed is None or k in allowed]
    if model._supports_flex_attn:
        kernels.append("flex_attention")
    default = model.config._attn_implementation
    return (default, *(k for k in kernels if k != default)) if default in kernels else tuple(kernels)


def _coupling(model: PreTrainedModel, config: PreTrainedConfig, *, by_trl: bool) -> str | None:
    """Return why the loss of a batch isn't the mean over its micro-batches, or None."""
    import torch
    import transformers

    # The one base class of BatchNorm1d to 3d and SyncBatchNorm; there is no public one.
    if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return "batch norm: its statistics are those of one micro-batch"
    weights = (getattr(config, name, 0.0) for name in ("router_aux_loss_coef", "router_z_loss_coef"))
    argument = inspect.signature(type(model).forward).parameters.get("output_router_logits")
    # Where the argument's default is False (Switch), the config's field has no effect.
    is_asked = getattr(config, "output_router_logits", False) and (argument is None or argument.default is not False)
    if (is_asked or (by_trl and hasattr(config, "output_router_logits"))) and any(weights):  # which TRL always asks for
        return "router loss: the balance between experts is that of one micro-batch"
    if hasattr(config, "expert_capacity"):
        version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
        # Since 5.23 the capacity of an expert of Switch is one per sequence, not per micro-batch.
        if config.model_type != "switch_transformers" or version < (5, 23):
            return "expert capacity: the tokens an expert drops depend on the whole micro-batch"
    return None


def _has_dropout(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Return whether a module, or the config, which is read at each call, has a rate above zero."""
    unused = () if getattr(config, "apply_spec_augment", True) else _HIDDEN_PARTS
    # Models with another head have these settings and don't use them.
    of_heads = ("classif", "summary", "cls", "pooler", "qa_", "final_dropout")
    read = {n: v for n, v in config.to_dict().items() if not any(word in n for word in of_heads)}
    found = ((holder, vars(holder)) for holder in model.modules())
    return any(
        is_rate(holder, name, value) and name not in unused
        for holder, values in itertools.chain(found, [(config, read)])
        for name, value in values.items()
    )


def is_rate(holder: object, name: str, value: object) -> bool:
    """Return whether an attribute of a module or a config is a rate above zero at which something is random."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return False
    is_dropout = name == "p" and "Drop" in type(holder).__name__  # torch's own
    # By name: dropout and its kin (attention_dropout, resid_pdrop, drop_path, layerdrop), and a router's noise.
    return is_dropout or name in _HIDDEN_PARTS or "drop" in name or "jitter" in name


def _positions(model: PreTrainedModel, config: PreTrainedConfig) -> int | None:
    """Return the longest sequence: the config's, less the positions that RoBERTa and its kin lose to padding."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if (
            name.endswith("position_embeddings")
            and padding is not None
            and module.weight.shape[0] == limit  # not BART and OPT, whose tables are longer by an offset
        ):
            return limit - int(padding) - 1 - hasattr(config, "ngram")  # ProphetNet looks one further
    return limit


def _linear_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the last names of the linear layers below the head, in order, without routers and the vision part."""
    import torch
    from transformers.pytorch_utils import Conv1D

    output, joins = model.get_output_embeddings(), model.config.model_type in IMAGES
    names: dict[str, None] = {}
    for path, module in model.base_model.named_modules():
        if not isinstance(module, torch.nn.Linear | Conv1D) or module is output or (joins and is_vision(path)):
            continue
        parent_path, _, name = path.rpartition(".")
        parent: torch.nn.Module = model.base_model.get_submodule(parent_path)
        if "Router" not in type(parent).__name__:
            names[name] = None
    return tuple(names)


def _fsdp_conflict(model: PreTrainedModel) -> str | None:
    """Return why accelerate can't shard `model` by FSDP2, or None.

    torch refuses a parameter that two units would own, and a unit that is made within one that is there.

    accelerate makes a unit of each layer of the classes in `_no_split_modules`, one of the input embedding, one of the
    head (with the embedding, if they are tied) and one of all the rest (`fsdp2_prepare_model` in 1.13 to 1.15).
    """
    layers = set(getattr(model, "_no_split_modules", None) or ())
    missing = sorted(layers - {type(module).__name__ for module in model.modules()})
    if missing:
        return f"accelerate looks for its layers by the name {missing[0]}, which none has"
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # which accelerate doesn't catch either
        return f"accelerate asks for its input embedding, which transformers doesn't know of {type(model).__name__}"
    is_tied = embedding is not None and getattr(head, "weight", None) is getattr(embedding, "weight", embedding)
    of_their_own = {id(embedding): head if is_tied else embedding, id(head): head}
    units: dict[str, object] = {}
    owners: dict[int, tuple[object, str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):  # parents before their children
        is_layer = type(module).__name__ in layers or not path
        around = units.get(path.rpartition(".")[0])
        if id(module) in of_their_own and around not in (None, model):
            return f"its {path} lies within {type(around).__name__}, and both would be FSDP units"
        unit = of_their_own.get(id(module), module if is_layer else around)
        units[path] = unit
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            here = f"{path}.{name}".lstrip(".")
            owner, there = owners.setdefault(id(parameter), (unit, here))
            if owner is not unit:
                return f"{there} and {here} are one parameter, which two FSDP units would own"
    return None
