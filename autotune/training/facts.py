"""What the classes of a type of model offer: the heads it can have, and what a built one can do.

A built model may be on the meta device: nothing is computed, only classes, modules and the config are
looked at. Whether this machine has what a kernel needs is not asked here. Called by
:mod:`autotune.training.build` alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from autotune.training.batches import PACKED
from autotune.training.inputs import is_supported
from autotune.training.parallel_facts import fsdp_conflict, tensor_parallel_heads
from autotune.values.model import EXPERTS_IMPLEMENTATIONS, Kind, ModelFacts, Task

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
    Task.SPEECH_CTC: ("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING_NAMES"),
    Task.SPEECH_SEQ2SEQ: ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    Task.AUDIO_CLASSIFICATION: (
        "AutoModelForAudioClassification",
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    ),
}
USUAL_TASK: dict[Kind, Task] = {
    "decoder": Task.CAUSAL_LM,
    "encoder": Task.SEQUENCE_CLASSIFICATION,
    "encoder-decoder": Task.SEQ2SEQ_LM,
    "vision": Task.IMAGE_CLASSIFICATION,
    "speech": Task.SPEECH_CTC,
    "speech-to-text": Task.SPEECH_SEQ2SEQ,
}

# Words in the names of a head's own settings, which other heads' models carry along unused.
_HEAD_SETTINGS = ("classif", "summary", "cls", "pooler", "qa_", "final_dropout")
# Shares of a recording that SpecAugment (arXiv:1904.08779) hides, as transformers' speech models call them.
_HIDDEN_PARTS = ("mask_time_prob", "mask_feature_prob")
# Of a config: names, who wrote it, and what a trial sets itself. The number of labels counts, not what they are called.
_NAMING = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype"}
    | {"id2label", "label2id"}
)
# Since this version Switch counts the tokens an expert may take by sequence, not by micro-batch.
_SWITCH_CAPACITY_PER_SEQUENCE = (5, 23)


def tasks_for(model_type: str, own_code: Collection[str]) -> tuple[Task, ...]:
    """Return the tasks for which the library, or the model's own code, has a head for this type.

    A speech model has no other heads than those for sound, whatever the library lists beside; none where autotune can't
    make its inputs.
    """
    from transformers.models.auto import modeling_auto

    found = tuple(
        task for task, (head, table) in HEADS.items() if head in own_code or model_type in getattr(modeling_auto, table)
    )
    if not any(task.takes_audio for task in found):
        return found
    return tuple(task for task in found if task.takes_audio) if is_supported(model_type) else ()


def kind_of(config: PreTrainedConfig, tasks: tuple[Task, ...]) -> Kind:
    """Tell the kind by the heads: BERT and its kin have both language heads, decoders only one."""
    if tasks and all(task.takes_audio for task in tasks):
        return "speech-to-text" if Task.SPEECH_SEQ2SEQ in tasks else "speech"
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
        layers=_layers(model),
        experts=(experts := experts_of(model.config)),
        experts_implementations=_experts_implementations(model) if experts else (),
        experts_per_token=getattr(config, "num_experts_per_tok", None) if experts else None,
        expert_capacity=getattr(config, "expert_capacity", None) if experts else None,
        liger=_has_liger(config.model_type),
        batch_coupled=_coupling(model, config),
        has_dropout=_has_dropout(model, config),
        packs=task is Task.CAUSAL_LM and model.config.model_type in PACKED,
        max_sequence_length=_positions(model, config) if task.takes_text else None,
        max_target_length=getattr(config, "max_target_positions", None) if task is Task.SPEECH_SEQ2SEQ else None,
        vocab_size=getattr(config, "vocab_size", None) if task.takes_text else None,
        linear_modules=_linear_modules(model),
        biases=sum(p.numel() for name, p in model.base_model.named_parameters() if name.endswith("bias")),
        expert_parameters=_expert_parameters(model),
        takes_prefix=_takes_prefix(model, config),
        not_fsdp=fsdp_conflict(model),
        tensor_parallel_heads=tensor_parallel_heads(model),
        architecture=_architecture(model),
    )


def _architecture(model: PreTrainedModel) -> str:
    """Return a digest of the class and of the figures that it was built with, wherever they came from."""
    figures = _figures(model.config.to_dict())
    written = json.dumps([type(model).__name__, model.config.num_labels, figures], sort_keys=True, default=str)
    return hashlib.sha256(written.encode()).hexdigest()[:16]


def _figures(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config, and the configs within it, without what only names things."""
    kept = {name: value for name, value in config.items() if name not in _NAMING}
    return {name: _figures(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _layers(model: PreTrainedModel) -> int | None:
    """Count the layers that transformers checkpoints one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules()) or None


def experts_of(config: PreTrainedConfig) -> int:
    """Return how many experts a layer has, 0 where there are none."""
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = max((int(getattr(text, name, None) or 0) for name in names), default=0)
    return found if found > 1 else 0


def _experts_implementations(model: PreTrainedModel) -> tuple[str, ...]:
    """List the ways of running experts, the class's default first; none where it has only its own."""
    if not model._can_set_experts_implementation():
        return ()
    default = model.config.get_text_config()._experts_implementation
    return (default, *(kind for kind in EXPERTS_IMPLEMENTATIONS if kind != default))


def _has_liger(model_type: str) -> bool:
    """Tell whether the installed liger-kernel patches models of this type."""
    if importlib.util.find_spec("liger_kernel") is None:
        return False
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except (ImportError, RuntimeError):  # without Triton, or without a device for it
        return False
    return model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


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
    augments = getattr(config, "apply_spec_augment", True)  # a model of sound may hide parts of it at random

    def is_rate(name: str, value: Any) -> bool:
        random = any(word in name for word in ("drop", "jitter")) or (augments and name in _HIDDEN_PARTS)
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


def _expert_parameters(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the last two names of the weights that hold all experts of a layer in one tensor, in order."""
    found = (name for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name)
    return tuple(dict.fromkeys(".".join(name.split(".")[-2:]) for name in found))


def _takes_prefix(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Tell whether peft's prefixes fit: the head hands a cache on, and heads share out the hidden size evenly.

    In T5's larger sizes they don't (`d_kv` times `num_heads` is more than `d_model`), and peft reshapes by the latter.
    """
    if "past_key_values" not in inspect.signature(type(model).forward).parameters:
        return False
    width = getattr(config, "d_kv", None)
    return width is None or width * config.num_heads == config.d_model
