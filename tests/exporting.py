"""Answers of searches that ran in no time, for tests of what is exported of them."""

import ast
import functools
from typing import Any

from answers import BASE, answer
from factories import make_config, make_gpu, make_hardware, make_plan, make_spec, make_workload

from autotune.exports.scripts import Draft
from autotune.exports.targets import draft
from autotune.training.arguments import arguments_of
from autotune.tuning_result import TuningResult, with_methods
from autotune.values.config import Parallelism, TrainConfig
from autotune.values.model import Task

GPU = make_gpu(cores=8)

SCRIPTS = ("python", "accelerate-loop", "trl")

# Another value of each knob that a configuration has, apart from those of other devices.
EACH_KNOB = {
    "precision": "bf16", "tf32": True, "optim": "adamw_bnb_8bit", "checkpointing": "every-2nd", "micro_batch": 8,
    "attn_implementation": "flash_attention_2", "experts_implementation": "grouped_mm", "experts_per_token": 1,
    "expert_capacity": 8, "use_liger_kernel": True, "torch_compile_backend": "inductor", "adapter": {"kind": "lora"},
    "dataloader_num_workers": 2, "dataloader_pin_memory": True, "torch_empty_cache_steps": 4,
    "expandable_segments": True, "chunked_loss": True, "activation_memory_budget": 0.5,
    "train_sampling_strategy": "group_by_length", "packing": True, "pad_to_multiple_of": 64,
}  # fmt: skip


def answer_of(config: TrainConfig, **plan: Any) -> TuningResult:
    """Return the answer in which `config` was faster than the baseline."""
    made, found = make_plan(**plan), _assembled()
    arguments = arguments_of(config, made.workload, made.hardware, None)
    best = found.best.model_copy(update={"config": config})
    asked = {name: getattr(made, name) for name in ("facts", "workload", "hardware")}
    return found.model_copy(update={**asked, "best": best, "arguments": arguments})


@functools.cache
def _assembled() -> TuningResult:
    """Any answer; its intervals take some tenths of a second."""
    found = answer([(BASE, 10.0), (make_config(4), 20.0)])
    assert found is not None
    return with_methods(found)


def answer_with(
    *,
    name: str = "meta-llama/Llama-3.2-1B",
    kind: str = "decoder",
    task: Task = Task.CAUSAL_LM,
    hardware: Any = GPU,
    own: dict[str, Any] | None = None,
    micro_batch: int = 4,
    parallelism: dict[str, Any] | None = None,
    **knobs: Any,
) -> TuningResult:
    """The answer of a search for a catalogue's model, on a GPU with everything, in which these knobs won."""
    workload = make_workload(model=make_spec(name=name, kind=kind), task=task, fixed_arguments=own or {})
    config = make_config(micro_batch, parallelism=Parallelism(**(parallelism or {})), **knobs)
    return answer_of(config, workload=workload, hardware=hardware)


def drafted(target: str, **answer: Any) -> Draft:
    return draft(answer_with(**answer), target)


def constant(source: str, name: str) -> Any:
    """Return a constant of a script by its name."""
    (value,) = [n.value for n in ast.parse(source).body if isinstance(n, ast.Assign) and n.targets[0].id == name]
    return ast.literal_eval(value)


CPU = make_hardware()

# Answers for the parsers of other libraries.
ANSWERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16", "tf32": True, "optim": "paged_adamw_8bit"},
    "pure-bf16": {"precision": "pure_bf16", "optim": "adafactor", "checkpointing": "full"},
    "fp16": {"precision": "fp16", "checkpointing": "full", "use_liger_kernel": True},
    "fp8": {"torch_compile_backend": "inductor", "precision": "fp8"},
    "compiled": {"torch_compile_backend": "inductor", "torch_compile_mode": "max-autotune", "precision": "bf16"},
    "lora": {"adapter": {"kind": "lora", "dropout": 0.1}, "precision": "bf16", "attn_implementation": "eager"},
    "dora": {"adapter": {"kind": "dora", "target_modules": "attention"}, "precision": "bf16"},
    "rslora": {"adapter": {"kind": "rslora"}, "precision": "bf16"},
    "qlora": {"adapter": {"kind": "lora"}, "quantization": "nf4-double", "precision": "bf16"},
    "int8": {"adapter": {"kind": "lora"}, "quantization": "int8", "precision": "fp16"},
    "flash": {"attn_implementation": "flash_attention_2", "precision": "bf16", "packing": True},
    "data": {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4},
    "by-length": {"train_sampling_strategy": "group_by_length"},
    "balanced": {"train_sampling_strategy": "batch_rebalance"},
    "own": {"own": {"learning_rate": 1e-4, "lr_scheduler_type": "cosine", "warmup_steps": 10, "weight_decay": 0.01}},
    "run": {"own": {"num_train_epochs": 5.0, "save_steps": 77, "logging_steps": 9, "neftune_noise_alpha": 5.0,
                    "warmup_steps": 0.1, "max_steps": 50, "save_total_limit": 2, "report_to": ["tensorboard"],
                    "accelerator_config": {"split_batches": False}, "eval_strategy": "steps", "data_seed": 7}},
    "ddp": {"parallelism": {"world_size": 2}},
    "fsdp": {"parallelism": {"world_size": 2, "sharding": "fsdp_full"}, "precision": "bf16", "checkpointing": "full"},
    "offload": {"checkpointing": "offload"},
    "experts": {"experts_implementation": "grouped_mm"},
}  # fmt: skip
