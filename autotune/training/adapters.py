"""Adapters and quantized base weights: the arguments of peft and bitsandbytes, and an adapter put on a model.

Arguments are plain JSON. An adapter's are those of peft's config class for its `peft_type`; BitFit, which peft doesn't
have, is named :data:`BITFIT` there. Trials and trainings with the answer both use `prepare_model`, or
`execution.user_code.fitted` for a user's own code, so that they train the same model.
"""

import dataclasses
import json
import warnings
from typing import Any

from autotune.training.inputs import VISION_PARTS
from autotune.values.config import Precision, TrainConfig
from autotune.values.model import Task
from autotune.values.techniques import Adapter, OwnAdapter

BITFIT = "BITFIT"

# Names of the attention projections in the families of the catalogue; peft matches the end of a module's name.
ATTENTION_MODULES = (
    "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "query_key_value", "query", "key", "value",
    "q", "k", "v", "o", "c_attn", "in_proj", "query_proj", "key_proj", "value_proj", "q_lin", "k_lin", "v_lin",
    "out_lin", "qkv", "Wqkv",
)  # fmt: skip

# Types whose kernels read weights of layers themselves: peft refuses LoRA on `out_proj`, on the others it does nothing.
_MAMBA_TYPES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_READ_BY_MAMBA = ("out_proj", "x_proj", "dt_proj")

# Weights of all experts in one tensor, as transformers 5 has them.
EXPERT_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")

# IA3 scales keys, values, and the input of the last feed-forward layer. Much as in peft's own table
# (TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING), which has only a few model types.
IA3_FEEDFORWARD = (
    "down_proj", "wo", "fc2", "w2", "dense_4h_to_h", "fc_out", "lin2", "ffn.output.dense", "mlp.c_proj", "output.dense",
)  # fmt: skip
IA3_MODULES = (
    "k_proj", "v_proj", "qkv_proj", "query_key_value", "key", "value", "k", "v", "c_attn", "in_proj", "key_proj",
    "value_proj", "k_lin", "v_lin", "qkv", "Wqkv", *IA3_FEEDFORWARD,
)  # fmt: skip

# peft.TaskType, where there is one, decides what peft's wrapper does with labels, and that a classifier's head trains.
_TASK_TYPES = {Task.CAUSAL_LM: "CAUSAL_LM", Task.SEQ2SEQ_LM: "SEQ_2_SEQ_LM", Task.SEQUENCE_CLASSIFICATION: "SEQ_CLS"}

# Names of the heads of classifiers, which are never quantized: they are new and have to be trained.
CLASSIFICATION_HEADS = ("score", "classifier", "classification_head")

# peft's type of each kind, how its config calls the adapter's fields, and further arguments.
_LORA = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
_PROMPT = {"virtual_tokens": "num_virtual_tokens"}
_IN_PEFT: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "lora": ("LORA", _LORA, {}),
    "rslora": ("LORA", _LORA, {"use_rslora": True}),
    "dora": ("LORA", _LORA, {"use_dora": True}),
    "vera": ("VERA", {"rank": "r", "dropout": "vera_dropout"}, {}),
    "ia3": ("IA3", {}, {"target_modules": list(IA3_MODULES), "feedforward_modules": list(IA3_FEEDFORWARD)}),
    "loha": ("LOHA", {"rank": "r", "alpha": "alpha"}, {}),
    "lokr": ("LOKR", {"rank": "r", "alpha": "alpha"}, {}),
    "prefix": ("PREFIX_TUNING", _PROMPT, {}),
    "prompt": ("PROMPT_TUNING", _PROMPT, {}),
    "p-tuning": ("P_TUNING", {**_PROMPT, "encoder_hidden_size": "encoder_hidden_size"}, {}),
    "bitfit": (BITFIT, {}, {}),
}


def adapter_arguments(adapter: Adapter, task: Task | None = None, model_type: str = "") -> dict[str, Any]:
    """Return the keyword arguments of peft's config class, and `peft_type`."""
    if isinstance(adapter, OwnAdapter):
        return dict(json.loads(adapter.arguments))
    peft_type, names, further = _IN_PEFT[adapter.kind]
    arguments = {"peft_type": peft_type, **{name: getattr(adapter, field) for field, name in names.items()}}
    if targets := getattr(adapter, "target_modules", None):
        arguments["target_modules"] = list(ATTENTION_MODULES) if targets == "attention" else "all-linear"
    if targets == "all-linear+experts":
        arguments["target_parameters"] = list(EXPERT_PARAMETERS)
    if peft_type == "LORA" and model_type in _MAMBA_TYPES:
        arguments["exclude_modules"] = list(_READ_BY_MAMBA)
    arguments |= further
    if task in _TASK_TYPES:
        arguments["task_type"] = _TASK_TYPES[task]
    if task is Task.IMAGE_TEXT_TO_TEXT:  # layers of the language model alone
        arguments["exclude_modules"] = rf"(.*\.)?({'|'.join(sorted(VISION_PARTS))})\..*"
    return arguments


def quantization_arguments(quantization: str, precision: Precision, task: Task) -> dict[str, Any]:
    """Return the keyword arguments of `transformers.BitsAndBytesConfig`; products are computed as `precision` says."""
    is_classifier = task in (Task.SEQUENCE_CLASSIFICATION, Task.IMAGE_CLASSIFICATION, Task.AUDIO_CLASSIFICATION)
    skipped = {"llm_int8_skip_modules": list(CLASSIFICATION_HEADS)} if is_classifier else {}
    if quantization == "int8":
        return {"load_in_8bit": True, **skipped}
    kind, _, double = quantization.partition("-")
    dtypes = {Precision.FP32: "float32", Precision.FP16: "float16"}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": bool(double),
        "bnb_4bit_compute_dtype": dtypes.get(precision, "bfloat16"),
        **skipped,
    }


def prepare_model(model: Any, adapter: dict[str, Any] | None, config: TrainConfig) -> Any:
    """Return a transformers model ready for a Trainer, with the adapter of `adapter_arguments`, if it isn't None.

    A compiled model keeps the configuration's `activation_memory_budget`, as do all that this process compiles. A
    ValueError says that the adapter finds nothing in the model that it could be put on.
    """
    from autotune.training.loss import chunk_loss, normalize_loss

    if config.activation_memory_budget is not None:
        from torch._functorch import config as partitioning

        partitioning.activation_memory_budget = config.activation_memory_budget
    if adapter is not None:
        model = put_on(model, adapter, mixed=config.mixed_precision != "no")
    if config.precision is Precision.FP8:
        multiply_in_float8(model)
    model = normalize_loss(model)
    return chunk_loss(model) if config.chunked_loss else model


def multiply_in_float8(model: Any) -> None:
    """Replace linear layers, but for the first and the last, by torchao's, as accelerate's recipe for fp8 does."""
    from accelerate.utils import convert_model_to_fp8_ao
    from torchao.float8 import Float8LinearConfig

    convert_model_to_fp8_ao(model, Float8LinearConfig(pad_inner_dim=True))  # of other sizes than multiples of 16


def casts_in_vain(adapter: dict[str, Any]) -> bool:
    """Return whether peft casts the inputs of adapted layers to fp32, the type of its weights, and autocast casts back.

    To leave that out changes no number and saves a copy of each input. Dropout and DoRA compute with the copy.
    """
    return adapter.get("peft_type") == "LORA" and not (adapter.get("use_dora") or adapter.get("lora_dropout"))


def put_on(model: Any, adapter: dict[str, Any], *, mixed: bool = False) -> Any:
    """Return `model` with an adapter of new weights, trained under autocast if `mixed`; raises as `prepare_model`."""
    config = peft_config(adapter)
    if config is None:  # all but the biases and the new head of a classifier are frozen
        biases = 0
        for name, parameter in model.named_parameters():
            is_bias, is_head = name.endswith("bias"), name.split(".")[0] in CLASSIFICATION_HEADS
            parameter.requires_grad_(is_bias or is_head)
            biases += is_bias and not is_head
        if not biases:
            raise ValueError("BitFit trains biases, and the model has none")
        return model
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    if config.is_prompt_learning and config.task_type == "SEQ_2_SEQ_LM":
        # Prefixes are the decoder's, but peft counts the layers of the encoder.
        layers = (getattr(model.config, name, None) for name in ("num_decoder_layers", "decoder_layers"))
        config.num_layers = next((count for count in layers if count), None)
    with warnings.catch_warnings():
        # Of what peft does by itself: GPT-2's layers hold their weights transposed, experts have fused weights.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", message=r"The following \w+_pattern keys did not match")
        model = get_peft_model(model, config)
    for module in model.modules():
        if mixed and casts_in_vain(adapter) and isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False
    return model


def peft_config(adapter: dict[str, Any]) -> Any | None:
    """Return the peft config of an adapter's arguments; None for BitFit, which peft doesn't have."""
    if adapter.get("peft_type") == BITFIT:
        return None
    import peft

    return peft.get_peft_config({"peft_type": "LORA", **adapter})


def own_adapter(model: Any) -> OwnAdapter | None:
    """Return the one adapter of a model; None: there are none or several, or JSON can't hold it."""
    configs = list((getattr(model, "peft_config", None) or {}).values())
    if len(configs) != 1:
        return None

    def plain(config: Any, name: str) -> Any:
        value = getattr(config, name, None)
        return sorted(value) if isinstance(value, set) else getattr(value, "value", value)  # of an enumeration's member

    names = {field.name for field in dataclasses.fields(configs[0]) if field.init} - {
        # Where an adapter came from, and how its values begin.
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "init_lora_weights",
        "init_weights", "loftq_config", "peft_type", "peft_version", "revision",
    }  # fmt: skip
    try:
        usual, given = type(configs[0])(), {name: plain(configs[0], name) for name in ("peft_type", *sorted(names))}
        told = {n: value for n, value in given.items() if n == "peft_type" or value != plain(usual, n)}
        return OwnAdapter(arguments=json.dumps(told))
    except (TypeError, ValueError):  # no JSON, or an adapter that has no defaults (AdaLoRA)
        return None
