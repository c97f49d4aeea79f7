"""A real training compared with what a search promised of it; `callback` measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from pydantic import Field, NonNegativeInt

from autotune.storage.recorded import WITHOUT_COST
from autotune.training.arguments import SEARCHED_ARGUMENTS
from autotune.units import show_memory, show_rate
from autotune.value import Value
from autotune.values.result import ResultData
from autotune.values.trial import Interval, Memory

# Waiting for data is a reason if its share of the time exceeds the promised share by this much.
WORTH_TELLING = 0.05

# Values of an argument that all mean off.
_OFF = (None, False, "", "none", "no")

# Arguments of evaluation, which isn't timed, and of the device, which is compared by itself.
_ELSEWHERE = {"per_device_eval_batch_size", "eval_accumulation_steps", "use_cpu"}

# Packages whose version changes the time of a step.
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")


class Promise(Value):
    """What a search measured of its winner."""

    samples_per_second: float
    interval: Interval = Field(description="of 95 % for the next run, where it was confirmed")
    memory: Memory
    data_wait_share: float | None
    samples_per_step: NonNegativeInt

    @classmethod
    def of(cls, result: ResultData) -> Promise | None:
        """Return what `result` promises; None if its best was never measured."""
        measured = result.best.measurement
        if measured is None:
            return None
        return cls(
            samples_per_second=measured.samples_per_second,
            interval=measured.shown_interval,
            memory=measured.memory,
            data_wait_share=measured.data_wait_share,
            samples_per_step=result.workload.samples_per_step(result.best.config),
        )

    def __str__(self) -> str:
        rate, interval = self.samples_per_second, self.interval
        if not interval.is_narrow:
            return f"about {show_rate(float(f'{rate:.2g}'))}"
        return f"{show_rate(rate)} ({show_rate(interval.low)} to {show_rate(interval.high)})"


class Production(Value):
    """What a training attained in the steps that count (see `callback`)."""

    when: str = Field(description="end of the training, UTC, ISO 8601")
    model: str
    config_id: str
    promise: Promise
    steps: NonNegativeInt = Field(description="that count")
    samples_per_step: NonNegativeInt
    samples_per_second: float | None = Field(description="None: no step counts")
    data_wait_share: float | None = None
    memory: Memory = Field(description="peak of the whole training; of the whole process on a CPU")
    reasons: tuple[str, ...] = Field(default=(), description="why it may differ from the promise")

    @property
    def ratio(self) -> float | None:
        """Attained over promised."""
        return None if self.samples_per_second is None else self.samples_per_second / self.promise.samples_per_second

    @property
    def is_slower(self) -> bool:
        """Whether it is slower than the promise's interval."""
        return self.samples_per_second is not None and self.samples_per_second < self.promise.interval.low

    def __str__(self) -> str:
        promised = str(self.promise)
        if self.samples_per_second is None or self.ratio is None:
            return f"too few steps to tell the throughput; promised: {promised} samples/s"
        line = f"{show_rate(self.samples_per_second)} samples/s over {self.steps} steps, "
        if self.promise.interval.low <= self.samples_per_second <= self.promise.interval.high:
            told = "as promised:" if self.promise.interval.is_narrow else "which can't be told from the promised"
            line += f"{told} {promised}"
        else:
            line += f"{self.ratio:.2f} times the promised {promised}"
            if self.is_slower:
                why = "; ".join(self.reasons) or (
                    "no reason was seen (samples of other lengths? another load of the machine?)"
                )
                line += f": {why}"
        return line + self._memory()

    def _memory(self) -> str:
        """Return the peak beside the promised one if both are a GPU's; a process holds more than its training."""
        seen, promised = self.memory.reserved_bytes, self.promise.memory.reserved_bytes
        if seen is None or promised is None:
            return ""
        return f"; peak {show_memory(seen)} reserved (promised {show_memory(promised)})"


def other_arguments(result: ResultData, arguments: Any) -> Iterator[str]:
    """Yield how TrainingArguments differ from the promised ones, where that changes the time of a step."""
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}
    promised = {_newest(name, defaults): value for name, value in result.arguments.training_arguments.items()}
    named = {name for name, value in promised.items() if isinstance(value, str | int | float | bool)}
    for name in sorted({_newest(n, defaults) for n in SEARCHED_ARGUMENTS | named} - WITHOUT_COST - _ELSEWHERE):
        wanted = promised.get(name, defaults.get(name, dataclasses.MISSING))
        seen = getattr(arguments, name, dataclasses.MISSING)
        if dataclasses.MISSING not in (wanted, seen) and _plain(wanted) != _plain(seen):
            yield f"{name} {_shown(seen)} (promised {_shown(wanted)})"


def other_model(result: ResultData, model: Any) -> Iterator[str]:
    """Yield how the model differs from the promised one: kernel, dtype, adapter."""
    promised = result.arguments.model
    kernel = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if None not in (kernel, promised.get("attn_implementation")) and kernel != promised["attn_implementation"]:
        yield f"{kernel} attention (promised {promised['attn_implementation']})"
    has_adapter = hasattr(model, "peft_config")
    if has_adapter != (result.arguments.adapter is not None and result.arguments.adapter.get("peft_type") != "BITFIT"):
        yield "with an adapter (promised without)" if has_adapter else "without the adapter (result.prepare_model)"
    dtype = str(getattr(next(iter(model.parameters()), None), "dtype", "")).removeprefix("torch.")
    if "float" in dtype and not has_adapter and dtype != promised.get("dtype", dtype):
        yield f"weights in {dtype} (promised {promised['dtype']})"


def other_machine(result: ResultData, name: str, cores: int, versions: dict[str, str]) -> Iterator[str]:
    """Yield how the machine differs from that of the search."""
    then = result.hardware
    if name != then.name:
        yield f"on {name} (promised on {then.name})"
    elif then.is_cpu and cores != then.cores:
        yield f"on {cores} cores (promised on {then.cores})"
    for package in _LIBRARIES:
        before, now = then.versions.get(package), versions.get(package)
        if None not in (before, now) and before != now:
            yield f"{package} {now} (promised with {before})"


def other_course(promise: Promise, samples_per_step: int, data_wait_share: float | None) -> Iterator[str]:
    """Yield how steps differ from the promised ones: their samples, and waiting for data."""
    if samples_per_step != promise.samples_per_step:
        yield f"{samples_per_step} samples a step (promised {promise.samples_per_step})"
    if data_wait_share is not None and data_wait_share > (promise.data_wait_share or 0.0) + WORTH_TELLING:
        known = "" if promise.data_wait_share is None else f" (promised {promise.data_wait_share:.0%})"
        yield f"steps wait for data {data_wait_share:.0%} of their time{known}"


def _newest(name: str, known: Collection[str]) -> str:
    """Return the name of an argument in the installed transformers, which may have its older name as well."""
    newer = name.replace("gradient_checkpointing", "activation_checkpointing")
    return newer if newer in known else name


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)
    return None if value in _OFF or value in ([], {}) else value


def _shown(value: Any) -> str:
    return str(getattr(value, "value", value))
