"""`AutotuneCallback`: a real training's throughput and memory beside what a search promised of them.

::

    step_end | log, evaluate, save | data | step_begin ... step_end | data | ...
             ^ mark                ^ mark (on_log, on_evaluate, on_save)    (a step counts from mark to step_end)

Steps of full size in the steady state count: not the first ones of the training, nor the first of an epoch, which waits
for the data loader to start, nor the last of an epoch, which may have fewer samples. The Trainer fetches the data of a
step before `step_begin`, so the time that it waits for them is known.
"""

import contextlib
import dataclasses
import math
import os
import resource
import sys
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt
from torch import cuda
from tqdm import tqdm
from transformers import TrainerCallback

from autotune.errors import AutotuneError, InputError
from autotune.execution import noise
from autotune.execution.noise import Clock, CudaClock, HostClock
from autotune.storage.run_directory import read_result
from autotune.training.arguments import SEARCHED_ARGUMENTS
from autotune.units import now, show_memory, show_rate, visible
from autotune.value import Value
from autotune.values.hardware import Hardware, detect
from autotune.values.result import ResultData
from autotune.values.trial import Interval, Memory
from autotune.values.workload import WITHOUT_COST

FILE_NAME = "autotune-production.jsonl"

# The first steps of a training, which are slower: compiling, filling caches, a loss scaler that finds its scale.
DISCARDED_STEPS = 3

# Packages whose versions change the time of a step.
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")


class Promise(Value):
    """Speed and memory of a winner, as the search measured them."""

    samples_per_second: float
    interval: Interval = Field(description="of 95 % for the next run, where it was confirmed")
    memory: Memory
    mfu: float | None = Field(default=None, description="model FLOP utilisation, if known")

    def __str__(self) -> str:
        interval = self.interval
        rate = show_rate(self.samples_per_second, is_sure=interval.is_narrow)
        return f"{rate} ({show_rate(interval.low)} to {show_rate(interval.high)})" if interval.is_narrow else rate


class Production(Value):
    """Speed and memory that a training attained in the steps that count."""

    when: str = Field(description="end of the training, UTC, ISO 8601")
    model: str
    config_id: str
    promise: Promise
    steps: NonNegativeInt = Field(description="that count")
    samples_per_step: NonNegativeInt
    samples_per_second: float | None = Field(description="None: no step counts")
    tokens_per_second: float | None = Field(default=None, description="if samples are as long as the search's")
    mfu: float | None = Field(default=None, description="model FLOP utilisation, likewise; None: the promise has none")
    data_wait_share: float | None = None
    memory: Memory = Field(description="peak of the whole training; of the whole process on a CPU")
    reasons: tuple[str, ...] = Field(default=(), description="why it may differ from the promise")

    def __str__(self) -> str:
        promise, rate = self.promise, self.samples_per_second
        if rate is None:
            return f"too few steps to tell the throughput; promised: {promise} samples/s"
        tokens, used = self.tokens_per_second, self.mfu
        said = [f"{show_rate(tokens)} tokens/s"] if tokens is not None else []
        said += [f"{used:.0%} MFU"] if used is not None else []
        lengths = f" ({', '.join(said)} if samples are as long as the search's)" if said else ""
        line = f"{show_rate(rate)} samples/s over {self.steps} step{'s' * (self.steps > 1)}{lengths}, "
        if promise.interval.low <= rate <= promise.interval.high:
            told = "as promised:" if promise.interval.is_narrow else "which can't be told from the promised"
            line += f"{told} {promise}"
        else:
            line += f"{rate / promise.samples_per_second:.2f} times the promised {promise}"
        if rate < promise.interval.low:
            none = "no reason was seen (samples of other lengths? another load of the machine?)"
            line += f": {'; '.join(self.reasons) or none}"
        seen, promised = self.memory.reserved_bytes, promise.memory.reserved_bytes
        if seen is None or promised is None:  # on a CPU: a process holds more than its training
            return line
        return f"{line}; peak {show_memory(seen)} reserved (promised {show_memory(promised)})"


class AutotuneCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Add it to a Trainer that trains with the answer of a search: it says whether the promised throughput is attained.

    At the end of training one line goes to stderr and, as JSON, to `autotune-production.jsonl` in the output directory;
    it is `report` too. If training was slower than the promise's interval, the line names what differs from the search.

    Args:
        promise: A result, or the path of a best-config.json.
        clock: Of the step times; by default the device's.

    Raises:
        InputError: It can't be read, or has no measurement.
    """

    def __init__(self, promise: ResultData | str | Path, *, clock: Clock | None = None) -> None:
        self._result = promise if isinstance(promise, ResultData) else read_result(promise)
        if (measured := self._result.best.measurement) is None:
            raise InputError("the result has no measurement of its best configuration to compare with")
        self._given_clock = clock
        mfu, correction = self._result.best.mfu, self._result.best.correction
        rate, interval = measured.samples_per_second * correction, measured.shown_interval.times(correction)
        self._promise = Promise(samples_per_second=rate, interval=interval, memory=measured.memory, mfu=mfu)
        self.report: Production | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock = self._given_clock or (CudaClock() if args.device.type == "cuda" else HostClock())
        self._pending: list[tuple[Any, Any, Any]] = []  # marks of a step: its start, its data are there, its end
        self._latest: tuple[Any, Any, Any] | None = None
        self._mark: Any = None
        self._begun: Any = None
        self._micro_steps = self._discarded = self._steps = 0
        self._total_s = self._waited_s = 0.0
        self._watch = noise.watch(str(args.device), ranks=args.world_size > 1)
        self._watch.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mark = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = self._clock.mark()
        self._micro_steps = 1

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_steps += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a step that counts; the latest waits until it is known not to be the last of an epoch."""
        end = self._clock.mark()
        if self._latest is not None:
            self._pending.append(self._latest)
        is_whole = self._micro_steps == args.gradient_accumulation_steps
        is_steady = self._mark is not None and self._discarded >= DISCARDED_STEPS
        self._latest = (self._mark, self._begun, end) if is_whole and is_steady else None
        self._discarded += 1
        self._mark = end
        if self._discarded % 50 == 0:
            self._watch.look()  # at clock and temperature of a GPU, while it computes
        # Steps whose marks are held before they are read, where nothing is logged; reading them waits for the device.
        if len(self._pending) >= 500:
            self._read()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out the time of logging, evaluating or saving, which have waited for the device anyway."""
        if self._mark is not None:
            self._read()
            self._mark = self._clock.mark()

    on_evaluate = on_save = on_log

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._latest = None

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._read()
        self.report = self._production(args, model)
        if not state.is_world_process_zero:
            return
        tqdm.write(visible(f"autotune: {self.report}"), file=sys.stderr)  # not behind the Trainer's progress bar
        folder = Path(args.output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / FILE_NAME).open("a") as file:
                file.write(self.report.model_dump_json() + "\n")
        except OSError as error:  # which doesn't end a training
            sys.stderr.write(visible(f"autotune: {folder / FILE_NAME} can't be written: {error.strerror}") + "\n")

    def _read(self) -> None:
        if self._pending:
            self._clock.settle()
        for start, begun, end in self._pending:
            self._total_s += self._clock.seconds(start, end)
            self._waited_s += self._clock.seconds(start, begun)
        self._steps, self._pending = self._steps + len(self._pending), []

    def _production(self, args: Any, model: Any) -> Production:
        result, promise = self._result, self._promise
        degrees = (os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1") for name in ("SP", "CP"))
        shared = math.prod(map(int, degrees)) * (getattr(model, "tp_size", None) or 1)
        others = getattr(getattr(args, "parallelism_config", None), "non_data_parallel_size", shared)
        data_parallel = max(1, int(args.world_size) // int(others))  # ranks that see different samples
        samples = args.train_batch_size * args.gradient_accumulation_steps * data_parallel
        share = self._waited_s / self._total_s if self._total_s else None
        machine = result.hardware
        with contextlib.suppress(AutotuneError):  # a device that NVML doesn't know is no reason
            machine = detect(str(args.device))
        reasons = differences(result, args, model, machine, samples_per_step=samples, data_wait_share=share)
        memory = Memory(resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # it counts KiB
        if args.device.type == "cuda":
            allocated, reserved = cuda.max_memory_allocated(args.device), cuda.max_memory_reserved(args.device)
            memory = Memory(allocated_bytes=allocated, reserved_bytes=reserved)
        rate = self._steps * samples / self._total_s if self._total_s else None
        tokens = result.workload.tokens_per_sample
        return Production(
            when=now(),
            model=result.workload.model.name,
            config_id=result.best.config.config_id,
            promise=promise,
            steps=self._steps,
            samples_per_step=samples,
            samples_per_second=rate,
            tokens_per_second=rate * tokens if rate and tokens else None,
            mfu=promise.mfu * rate / promise.samples_per_second if rate and promise.mfu else None,
            data_wait_share=share,
            memory=memory,
            reasons=(*reasons, *self._watch.conditions().warnings()),
        )


def differences(
    result: ResultData,
    arguments: Any,
    model: Any,
    machine: Hardware,
    *,
    samples_per_step: int,
    data_wait_share: float | None,
) -> list[str]:
    """Return what is known to differ from the promised training and changes the time of a step."""
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}

    def newest(name: str) -> str:  # in the installed transformers, which may have the older name as well
        newer = name.replace("gradient_checkpointing", "activation_checkpointing")
        return newer if newer in defaults else name

    def plain(value: Any) -> Any:  # values that all mean off are one
        return None if value in (None, False, "", "none", "no", [], {}) else value

    promised = {newest(name): value for name, value in result.arguments.training_arguments.items()}
    named = {name for name, value in promised.items() if isinstance(value, str | int | float | bool)}
    # Evaluation isn't timed, and the device is compared by itself.
    elsewhere = {"per_device_eval_batch_size", "eval_accumulation_steps", "use_cpu"}
    rows: list[tuple[str, Any, Any]] = []  # what, as promised, now
    for name in sorted({newest(n) for n in SEARCHED_ARGUMENTS | named} - WITHOUT_COST - elsewhere):
        wanted, seen = promised.get(name, defaults.get(name, dataclasses.MISSING)), getattr(arguments, name, None)
        if isinstance(wanted, dict) and isinstance(seen, dict):
            seen = {key: seen.get(key) for key in wanted}  # transformers adds defaults
        if wanted is not dataclasses.MISSING and hasattr(arguments, name):
            rows.append((name, getattr(wanted, "value", wanted), getattr(seen, "value", seen)))
    then, of_model = result.hardware, result.arguments.model
    known: list[tuple[str, Any, Any]] = [
        ("samples a step:", result.workload.samples_per_step(result.best.config), samples_per_step),
        ("device:", then.name, machine.name),
        ("cores:", then.cores, machine.cores if machine.is_cpu and machine.name == then.name else None),
        *((package, then.versions.get(package), machine.versions.get(package)) for package in _PACKAGES),
    ]
    if model is not None:
        config, has_adapter = getattr(model, "config", None), hasattr(model, "peft_config")
        weight = str(getattr(next(iter(model.parameters()), None), "dtype", "")).removeprefix("torch.")
        known += [
            ("attention:", of_model.get("attn_implementation"), getattr(config, "_attn_implementation", None)),
            ("adapter:", (result.arguments.adapter or {}).get("peft_type", "BITFIT") != "BITFIT", has_adapter),
            ("weights:", of_model.get("dtype"), weight if "float" in weight and not has_adapter else None),
        ]
    rows += [row for row in known if None not in row]
    told = [f"{what} {now} (promised {wanted})" for what, wanted, now in rows if plain(wanted) != plain(now)]
    waited = result.best.measurement.data_wait_share if result.best.measurement is not None else None
    # Waiting for data is a reason if its share of the time exceeds the promised share by this much.
    if data_wait_share is not None and data_wait_share > (waited or 0.0) + 0.05:
        told.append(f"waiting for data: {data_wait_share:.0%} of a step (promised {waited or 0.0:.0%})")
    return told
