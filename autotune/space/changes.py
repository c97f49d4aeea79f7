"""What a configuration changes of the user's training, and how deep each change goes.

Pure. The classes are those of :class:`autotune.values.config.Allowance`; where a knob is exact depends on the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.training.arguments import effective_tf32
from autotune.values.adapters import Adapter
from autotune.values.config import Allowance, Parallelism, Precision, TrainConfig
from autotune.values.model import ModelFacts
from autotune.values.problem import Problem
from autotune.values.result import Change

# The same update rule, differently scheduled on the device.
_SAME_OPTIMIZER = frozenset({"adamw_torch", "adamw_torch_fused"})

_EXACT_KNOBS = frozenset(
    {
        "checkpointing", "attn_implementation", "experts_implementation", "dataloader_num_workers",
        "dataloader_prefetch_factor", "dataloader_pin_memory",
    }
)  # fmt: skip
_SPLITTING = ("world_size", "tensor_parallel", "pipeline_parallel")  # deal samples or matrices to other ranks
_METHOD_KNOBS = frozenset({"adapter", "quantization", "experts_per_token", "expert_capacity"})


def changes(config: TrainConfig, problem: Problem) -> tuple[Change, ...]:
    """Return what `config` changes against the baseline, in the order of the fields."""
    rounds = _rounds_otherwise(config, problem)
    return tuple(
        Change(
            knob=knob,
            before=_shown(before),
            after=_shown(after),
            allowance=_class_of(knob, before, after, problem.facts, config, rounds=rounds),
        )
        for knob, before, after in _differences(config, problem.baseline)
    )


def allowance_of(config: TrainConfig, problem: Problem) -> Allowance:
    """Return the class of the deepest change of `config` against the baseline."""
    rounds = _rounds_otherwise(config, problem)
    classes = (
        _class_of(knob, before, after, problem.facts, config, rounds=rounds)
        for knob, before, after in _differences(config, problem.baseline)
    )
    return max(classes, key=lambda c: c.rank, default=Allowance.EXACT)


def _rounds_otherwise(config: TrainConfig, problem: Problem) -> bool:
    """Return whether products in fp32 are TF32 in one of the two alone: a compiler switches it on."""
    return effective_tf32(config, problem.hardware) != effective_tf32(problem.baseline, problem.hardware)


def _differences(config: TrainConfig, baseline: TrainConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the knobs that differ, with the baseline's value and the configuration's."""
    for knob in TrainConfig.model_fields:
        before, after = getattr(baseline, knob), getattr(config, knob)
        if before == after:
            continue
        if knob == "parallelism":
            for field in Parallelism.model_fields:
                if getattr(before, field) != getattr(after, field):
                    yield f"{knob}.{field}", getattr(before, field), getattr(after, field)
        else:
            yield knob, before, after


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Adapter):
        return value.shown
    return str(value)


def _class_of(knob: str, before: Any, after: Any, facts: ModelFacts, config: TrainConfig, *, rounds: bool) -> Allowance:
    if knob in _EXACT_KNOBS:
        return Allowance.EXACT
    if knob.startswith("parallelism."):
        return _of_devices(knob.removeprefix("parallelism."), before, after, facts, config)
    if knob == "per_device_train_batch_size":
        if facts.split_changes is not None:
            return Allowance.METHOD
        return Allowance.NUMERICS if facts.batch_coupled else Allowance.EXACT
    if knob in ("torch_compile_backend", "torch_compile_mode"):  # compiled dropout draws other random numbers
        return Allowance.NUMERICS if facts.has_dropout or rounds else Allowance.EXACT
    if knob == "tf32":
        return Allowance.NUMERICS if rounds else Allowance.EXACT
    if knob == "packing":  # the same samples in the same step; a batch that is coupled is so by its padding too
        return Allowance.NUMERICS if facts.has_dropout or facts.batch_coupled else Allowance.EXACT
    if knob == "optim":
        return Allowance.EXACT if {before, after} <= _SAME_OPTIMIZER else Allowance.OPTIMIZER
    if knob in _METHOD_KNOBS or Precision.PURE_BF16 in (before, after):
        return Allowance.METHOD
    return Allowance.NUMERICS  # precision, fused loss kernels, the order of the samples


def _of_devices(knob: str, before: Any, after: Any, facts: ModelFacts, config: TrainConfig) -> Allowance:
    """Return the class of a knob of several devices.

    Ranks draw dropout of their own, and what is coupled over a micro-batch is so over a smaller one. Who keeps which
    shard of the states changes no number in fp32; with 16-bit arithmetic each library rounds in other places.
    """
    if knob in _SPLITTING:
        return Allowance.NUMERICS if facts.has_dropout or facts.batch_coupled else Allowance.EXACT
    if knob == "sharding" and config.precision in (Precision.BF16, Precision.FP16):
        # DDP adds up gradients in fp32 and casts operator by operator; accelerate has FSDP reduce in 16 bits and cast
        # whole units (`set_mixed_precision`), and DeepSpeed trains 16-bit weights with fp32 masters.
        return Allowance.EXACT if _library(before) == _library(after) else Allowance.NUMERICS
    return Allowance.EXACT


def _library(sharding: str) -> str:
    """Return whose sharding it is: 'none', 'fsdp' or 'zero'."""
    return sharding.partition("_")[0]
