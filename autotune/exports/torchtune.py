"""torchtune's YAML, for its fine-tuning recipes. Components are those of torchtune 0.6, where a test has it validated.

torchtune has models, recipes and a way to shard of its own: what it trains is the same model and step, not the same
program, so the measured throughput is no promise there, and the file says so.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from autotune.errors import InputError
from autotune.exports.dialect import LORA_KINDS, lost_knobs, require_causal_lm
from autotune.exports.draft import Draft
from autotune.exports.loop_optimizers import STAND_IN, loop_optimizer, made
from autotune.exports.winner import Winner, lost_arguments
from autotune.exports.yaml_text import yaml_text
from autotune.training.arguments import effective_tf32
from autotune.training.parallel_arguments import FSDP_KINDS
from autotune.values.config import Precision, TrainConfig

FILE = "torchtune.yaml"
_CHECKPOINT = "${checkpoint_dir}"


class Family(NamedTuple):
    """How torchtune names the parts of a family of models."""

    package: str
    tokenizer: str
    files: dict[str, str]  # arguments of the tokenizer that name files of the checkpoint
    model_type: str


_SENTENCEPIECE = {"path": f"{_CHECKPOINT}/tokenizer.model"}
_TIKTOKEN = {"path": f"{_CHECKPOINT}/original/tokenizer.model"}
_BPE = {"path": f"{_CHECKPOINT}/vocab.json", "merges_file": f"{_CHECKPOINT}/merges.txt"}
_BPE_PHI4 = {"vocab_path": f"{_CHECKPOINT}/vocab.json", "merges_path": f"{_CHECKPOINT}/merges.txt"}

_FAMILIES = {
    "llama2": Family("llama2", "llama2.llama2_tokenizer", _SENTENCEPIECE, "LLAMA2"),
    "llama3": Family("llama3", "llama3.llama3_tokenizer", _TIKTOKEN, "LLAMA3"),
    "llama3_1": Family("llama3_1", "llama3.llama3_tokenizer", _TIKTOKEN, "LLAMA3"),
    "llama3_2": Family("llama3_2", "llama3.llama3_tokenizer", _TIKTOKEN, "LLAMA3_2"),
    "mistral": Family("mistral", "mistral.mistral_tokenizer", _SENTENCEPIECE, "MISTRAL"),
    "gemma": Family("gemma", "gemma.gemma_tokenizer", _SENTENCEPIECE, "GEMMA"),
    "gemma2": Family("gemma2", "gemma.gemma_tokenizer", _SENTENCEPIECE, "GEMMA2"),
    "phi3": Family("phi3", "phi3.phi3_mini_tokenizer", _SENTENCEPIECE, "PHI3_MINI"),
    "phi4": Family("phi4", "phi4.phi4_tokenizer", _BPE_PHI4, "PHI4"),
    "qwen2": Family("qwen2", "qwen2.qwen2_tokenizer", _BPE, "QWEN2"),
    "qwen2_5": Family("qwen2_5", "qwen2_5.qwen2_5_tokenizer", _BPE, "QWEN2"),
}

# Builders of torchtune.models, with the family in front, by hub id; instruct and chat models are built alike.
_BUILDERS = {
    "meta-llama/llama-2-7b": ("llama2", "llama2_7b"),
    "meta-llama/llama-2-13b": ("llama2", "llama2_13b"),
    "meta-llama/llama-2-70b": ("llama2", "llama2_70b"),
    "meta-llama/meta-llama-3-8b": ("llama3", "llama3_8b"),
    "meta-llama/meta-llama-3-70b": ("llama3", "llama3_70b"),
    "meta-llama/llama-3.1-8b": ("llama3_1", "llama3_1_8b"),
    "meta-llama/llama-3.1-70b": ("llama3_1", "llama3_1_70b"),
    "meta-llama/llama-3.1-405b": ("llama3_1", "llama3_1_405b"),
    "meta-llama/llama-3.2-1b": ("llama3_2", "llama3_2_1b"),
    "meta-llama/llama-3.2-3b": ("llama3_2", "llama3_2_3b"),
    "mistralai/mistral-7b-v0.1": ("mistral", "mistral_7b"),
    "google/gemma-2b": ("gemma", "gemma_2b"),
    "google/gemma-7b": ("gemma", "gemma_7b"),
    "google/gemma-2-2b": ("gemma2", "gemma2_2b"),
    "google/gemma-2-9b": ("gemma2", "gemma2_9b"),
    "google/gemma-2-27b": ("gemma2", "gemma2_27b"),
    "microsoft/phi-3-mini-4k": ("phi3", "phi3_mini"),
    "microsoft/phi-4": ("phi4", "phi4_14b"),
    "qwen/qwen2-0.5b": ("qwen2", "qwen2_0_5b"),
    "qwen/qwen2-1.5b": ("qwen2", "qwen2_1_5b"),
    "qwen/qwen2-7b": ("qwen2", "qwen2_7b"),
    "qwen/qwen2.5-0.5b": ("qwen2_5", "qwen2_5_0_5b"),
    "qwen/qwen2.5-1.5b": ("qwen2_5", "qwen2_5_1_5b_base"),
    "qwen/qwen2.5-3b": ("qwen2_5", "qwen2_5_3b"),
    "qwen/qwen2.5-7b": ("qwen2_5", "qwen2_5_7b_base"),
    "qwen/qwen2.5-14b": ("qwen2_5", "qwen2_5_14b_base"),
    "qwen/qwen2.5-32b": ("qwen2_5", "qwen2_5_32b_base"),
}
_WITHOUT_DORA = ("llama3_1_405b",)
_ENDINGS = ("-hf", "-instruct", "-chat", "-it")

_ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]


def torchtune(winner: Winner) -> Draft:
    """Return torchtune's file.

    Raises:
        InputError: It has no such model, task or adapter.
    """
    require_causal_lm(winner, "torchtune")
    adapter = winner.config.adapter
    if adapter is not None and (adapter.kind not in LORA_KINDS or adapter.kind == "rslora"):
        raise InputError(f"torchtune: it has no adapter {adapter.kind} (only lora and dora); use --to python")
    family, builder = _builder(winner)
    if adapter is not None and adapter.kind == "dora" and builder in _WITHOUT_DORA:
        raise InputError(f"torchtune: its {builder} has no dora; use --to python")
    lost = _lost(winner)
    document = {
        "output_dir": "out",
        "checkpoint_dir": _plain(winner.reference),
        "model": _model(winner, family, builder),
        "tokenizer": {
            "_component_": f"torchtune.models.{family.tokenizer}",
            **family.files,
            "max_seq_len": winner.workload.sequence_length,
        },
        "checkpointer": _checkpointer(family),
        **_data(winner),
        **_optimisation(winner),
        **_device(winner),
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
        },
        "log_every_n_steps": _own(winner).get("logging_steps", 1),
    }
    command = _command(winner)
    about = (
        "`checkpoint_dir` (from `tune download`), its files and `dataset` are yours to name. torchtune is a program of "
        "its own: the throughput that was measured with transformers is no promise here."
    )
    return Draft(
        {FILE: yaml_text(winner, f"torchtune: {command}", document, lost, about=about)}, (command,), tuple(lost)
    )


def _plain(text: str) -> str:
    """Return a text that OmegaConf, which reads the file, looks up nothing in: `${oc.env:...}` is a variable of its."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def _builder(winner: Winner) -> tuple[Family, str]:
    name = winner.workload.model.name.lower()
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    if name not in _BUILDERS:
        raise InputError(f"torchtune: it has no builder for {winner.workload.model.name}; --to python writes a Trainer")
    family, builder = _BUILDERS[name]
    return _FAMILIES[family], builder


def _command(winner: Winner) -> str:
    kind = "full" if winner.config.adapter is None else "lora"
    several = winner.config.parallelism.world_size > 1
    launch = f"--nproc_per_node {winner.config.parallelism.world_size} " if several else ""
    return f"tune run {launch}{kind}_finetune_{'distributed' if several else 'single_device'} --config {FILE}"


def _lost(winner: Winner) -> list[str]:
    """Return what differs from what was measured."""
    config, spread = winner.config, winner.config.parallelism
    kernel, workers, backend = config.attn_implementation, config.dataloader_num_workers, config.torch_compile_backend
    schedule, warmup = winner.hyperparameter("lr_scheduler_type"), winner.hyperparameter("warmup_steps")
    found = (
        (
            config.precision in (Precision.BF16, Precision.FP16),
            f"float32 weights beside {config.precision}: all is bf16",
        ),
        (effective_tf32(config, winner.result.hardware), "tf32"),
        (kernel not in ("sdpa", None), f"attention by {kernel}: torchtune's own by SDPA runs"),
        (config.use_liger_kernel, "liger kernels"),
        (backend is not None, f"the model compiled as a whole by {backend}: layers are, one by one"),
        (workers > 0, f"{workers} workers that load data: the training process does"),
        (config.dataloader_pin_memory and not winner.result.hardware.is_cpu, "batches in pinned memory"),
        (config.train_sampling_strategy == "group_by_length", "samples grouped by length"),
        (config.packing, "packing of a micro-batch: `packed: true` makes blocks of a fixed length, another training"),
        (config.quantization is not None, f"{config.quantization} by bitsandbytes: torchtune's own nf4"),
        (spread.world_size > 1 and spread.sharding not in FSDP_KINDS, f"sharding {spread.sharding}: FSDP2 shards"),
        (spread.tensor_parallel > 1, f"tensor parallel over {spread.tensor_parallel} devices"),
        (config.checkpointing == "reentrant", "checkpointing reentrant: it isn't"),
        (winner.hyperparameter("weight_decay") > 0, "biases and norms without weight decay: they decay too"),
        (loop_optimizer(winner) is None, f"optimizer {config.optim}: {STAND_IN} in its place"),
        (schedule not in _SCHEDULERS, f"schedule {schedule}: linear"),
        (0 < warmup < 1, f"warm-up over {warmup:.0%} of the steps: it counts steps, of which it has none"),
    )
    knobs = lost_knobs(config, but=frozenset({"offload"}))
    return [*(line for differs, line in found if differs), *knobs, *lost_arguments(winner, {"seed", *_own(winner)})]


def _own(winner: Winner) -> dict[str, int]:
    """Return those of the user's own arguments that it has: whole epochs, and steps between lines of the log."""
    own = {name: winner.own_arguments.get(name) for name in ("num_train_epochs", "logging_steps")}
    return {name: int(v) for name, v in own.items() if isinstance(v, int | float) and v >= 1 and v % 1 == 0}


def _model(winner: Winner, family: Family, builder: str) -> dict[str, Any]:
    adapter, config = winner.peft_arguments, winner.config
    place = f"torchtune.models.{family.package}"
    if adapter is None:
        return {"_component_": f"{place}.{builder}"}
    return {
        "_component_": f"{place}.lora_{builder}",
        "lora_attn_modules": _ATTENTION,
        "apply_lora_to_mlp": adapter["target_modules"] == "all-linear",
        "lora_rank": adapter["r"],
        "lora_alpha": adapter["lora_alpha"],
        "lora_dropout": adapter["lora_dropout"],
        **({"use_dora": True} if adapter.get("use_dora") else {}),
        **({"quantize_base": True} if config.quantization is not None else {}),
    }


def _checkpointer(family: Family) -> dict[str, Any]:
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": _CHECKPOINT,
        "checkpoint_files": ["model.safetensors"],
        "recipe_checkpoint": None,
        "output_dir": "${output_dir}",
        "model_type": family.model_type,
    }


def _data(winner: Winner) -> dict[str, Any]:
    return {
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": False,
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": _plain(winner.workload.dataset or "YOUR-DATA.jsonl"),
            "column": _plain(winner.workload.text_field or "text"),
            "split": "train",
            "packed": False,
        },
        "seed": winner.arguments["seed"],
        "shuffle": winner.config.train_sampling_strategy != "sequential",
        "batch_size": winner.config.per_device_train_batch_size,
        "epochs": _own(winner).get("num_train_epochs", 1),
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": winner.accumulation,
    }


_SCHEDULERS = {
    "linear": "transformers.get_linear_schedule_with_warmup",
    "cosine": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
}


def _optimisation(winner: Winner) -> dict[str, Any]:
    optimizer = loop_optimizer(winner) or made(STAND_IN, winner.hyperparameter)
    arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in optimizer.arguments.items()}
    schedule = _SCHEDULERS.get(winner.hyperparameter("lr_scheduler_type"), _SCHEDULERS["linear"])
    norm = winner.hyperparameter("max_grad_norm")
    return {
        "optimizer": {
            "_component_": f"{optimizer.module}.{optimizer.name}",
            **arguments,
            "weight_decay": winner.hyperparameter("weight_decay"),
        },
        "optimizer_in_bwd": False,
        "lr_scheduler": {"_component_": schedule, "num_warmup_steps": int(winner.hyperparameter("warmup_steps"))},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "clip_grad_norm": norm if norm > 0 else None,
    }


def _device(winner: Winner) -> dict[str, Any]:
    config = winner.config
    return {
        "device": "cpu" if winner.result.hardware.is_cpu else "cuda",
        "dtype": "fp32" if config.precision is Precision.FP32 else "bf16",
        "compile": config.torch_compile_backend is not None,
        "enable_activation_checkpointing": config.checkpointing != "none",
        "enable_activation_offloading": config.checkpointing == "offload",
        **_fsdp(config),
    }


def _fsdp(config: TrainConfig) -> dict[str, Any]:
    spread = config.parallelism
    if spread.world_size == 1:
        return {}
    return {
        "fsdp_reshard_after_forward": spread.sharding != "fsdp_grad_op",
        "fsdp_cpu_offload": spread.offload == "parameters",
    }
