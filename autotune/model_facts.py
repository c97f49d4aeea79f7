"""What the classes of a type of model offer: the heads it can have, and what a built one can do.

A built model may be on the meta device: nothing is computed, only classes, modules and the config are
looked at. Whether this machine has what a kernel needs is not asked here. Called by
:mod:`autotune.models` alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from autotune.architecture import Kind, ModelFacts, Task

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


# The class that picks the head, and the table of transformers that says which model types have one.
HEADS = {
    Task.CAUSAL_LM: ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    Task.SEQ2SEQ_LM: ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    Task.MASKED_LM: ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    Task.SEQUENCE_CLASSIFICATION: (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    Task.IMAGE_CLASSIFICATION: (
        "AutoModelForImageClassification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    ),
}
_SPEECH = ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES")
USUAL_TASK: dict[Kind, Task] = {
    "decoder": Task.CAUSAL_LM,
    "encoder": Task.SEQUENCE_CLASSIFICATION,
    "encoder-decoder": Task.SEQ2SEQ_LM,
    "vision": Task.IMAGE_CLASSIFICATION,
}

# Words in the names of a head's own settings, which other heads' models carry along unused.
_HEAD_SETTINGS = ("classif", "summary", "cls", "pooler", "qa_", "final_dropout")
# Since this version Switch counts the tokens an expert may take by sequence, not by micro-batch.
_SWITCH_CAPACITY_PER_SEQUENCE = (5, 23)


def tasks_for(model_type: str, own_code: Collection[str]) -> tuple[Task, ...]:
    """Return the tasks for which the library, or the model's own code, has a head for this type.

    Speech models are left out, whatever text head they have beside.
    """
    from transformers.models.auto import modeling_auto

    if any(model_type in getattr(modeling_auto, table) for table in _SPEECH):
        return ()
    return tuple(
        task for task, (head, table) in HEADS.items() if head in own_code or model_type in getattr(modeling_auto, table)
    )


def kind_of(config: PreTrainedConfig, tasks: tuple[Task, ...]) -> Kind:
    """Tell the kind by the heads: BERT and its kin have both language heads, decoders only one."""
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder"
    if Task.CAUSAL_LM in tasks and (Task.MASKED_LM not in tasks or getattr(config, "is_decoder", False)):
        return "decoder"
    if Task.MASKED_LM in tasks or Task.SEQUENCE_CLASSIFICATION in tasks:
        return "encoder"
    return "vision"


def facts_of(model: PreTrainedModel, task: Task) -> ModelFacts:
    """Return the facts about a built model and its head."""
    config = model.config.get_text_config()
    return ModelFacts(
        task=task,
        parameters=sum(p.numel() for p in model.parameters()),
        attn_implementations=_attention(model),
        supports_checkpointing=bool(model.supports_gradient_checkpointing),
        batch_coupled=_coupling(model, config),
        has_dropout=_has_dropout(model, config),
        max_sequence_length=_positions(model, config) if task.takes_text else None,
        vocab_size=getattr(config, "vocab_size", None) if task.takes_text else None,
        linear_modules=_linear_modules(model),
    )


def _attention(model: PreTrainedModel) -> tuple[str, ...]:
    """List the kernels of the class's flags; none for a model without attention (ResNet, Mamba)."""
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


def _coupling(model: PreTrainedModel, config: PreTrainedConfig) -> str | None:
    """Say why the loss of a batch is not the mean over its micro-batches, or None."""
    import torch
    import transformers

    # BatchNorm1d to 3d and SyncBatchNorm have this class in common and no public one.
    if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return "batch norm: its statistics are those of one micro-batch"
    if _router_loss(model, config):
        return "router loss: the balance between experts is that of one micro-batch"
    if hasattr(config, "expert_capacity"):
        version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
        if config.model_type != "switch_transformers" or version < _SWITCH_CAPACITY_PER_SEQUENCE:
            return "expert capacity: the tokens an expert drops depend on the whole micro-batch"
    return None


def _router_loss(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Tell whether the router's loss is part of the model's loss, by its config and its signature."""
    weights = (getattr(config, name, 0.0) for name in ("router_aux_loss_coef", "router_z_loss_coef"))
    if not getattr(config, "output_router_logits", False) or not any(weights):
        return False
    argument = inspect.signature(type(model).forward).parameters.get("output_router_logits")
    # Where the argument's default is False (Switch) the config's switch is never looked at.
    return argument is None or argument.default is not False


def _has_dropout(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Look for a positive rate in the modules and, for those read at each call, in the config."""

    def is_rate(name: str, value: Any) -> bool:
        random = any(word in name for word in ("drop", "jitter"))
        return random and isinstance(value, int | float) and not isinstance(value, bool) and value > 0

    for module in model.modules():
        if "Drop" in type(module).__name__ and is_rate("drop", getattr(module, "p", 0.0)):
            return True
        if any(is_rate(name, value) for name, value in vars(module).items()):
            return True
    return any(
        is_rate(name, value)
        for name, value in config.to_dict().items()
        if not any(word in name for word in _HEAD_SETTINGS)
    )


def _positions(model: PreTrainedModel, config: PreTrainedConfig) -> int | None:
    """Return the longest sequence: the config's, less the rows that RoBERTa and its kin lose to padding."""
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
            return limit - int(padding) - 1
    return limit


def _linear_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the last names of the linear layers below the head, in order; routers are left out."""
    import torch
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    names: dict[str, None] = {}
    for path, module in model.base_model.named_modules():
        if not isinstance(module, torch.nn.Linear | Conv1D) or module is output:
            continue
        parent_path, _, name = path.rpartition(".")
        parent: torch.nn.Module = model.base_model.get_submodule(parent_path)
        if "Router" not in type(parent).__name__:
            names[name] = None
    return tuple(names)
