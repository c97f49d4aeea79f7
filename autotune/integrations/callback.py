"""`AutotuneCallback`: a real training's throughput and memory beside what a search promised of them.

::

    step_end | log, evaluate, save | data | step_begin ... step_end | data | ...
             ^ mark                ^ mark (on_log, on_evaluate, on_save)    (a step counts from mark to step_end)

Steps of full size in the steady state count: not the first ones of the training, nor the first of an epoch, which waits
for the data loader to start, nor the last of an epoch, which may have fewer samples. The Trainer fetches the data of a
step before `step_begin`, so the time that it waits for them is known.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import resource
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers import TrainerCallback

from autotune.errors import AutotuneError, InputError
from autotune.execution import noise
from autotune.execution.noise import Clock, CudaClock, HostClock
from autotune.integrations.promise import Production, Promise, other_arguments, other_course, other_machine, other_model
from autotune.storage.results import read_result
from autotune.units import visible
from autotune.values.hardware import detect, installed_versions
from autotune.values.result import ResultData
from autotune.values.trial import Memory

FILE_NAME = "autotune-production.jsonl"

# The first steps of a training, which are slower: compiling, filling caches, a loss scaler that finds its scale.
DISCARDED_STEPS = 3

# Steps whose marks are held before they are read, where nothing is logged; reading them waits for the device.
_MOST_PENDING = 500

# Steps between two readings of a GPU's clock and temperature.
_LOOK_EVERY = 50


class _Step(NamedTuple):
    """Marks of one optimizer step."""

    start: Any
    begun: Any  # the data are there
    end: Any


class AutotuneCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Add it to a Trainer that trains with the answer of a search: it says whether the promised throughput is attained.

    At the end of training one line goes to stderr and, as JSON, to `autotune-production.jsonl` in the output directory;
    it is the attribute `report` too. If training was slower than the promise's interval, the line names what differs
    from the search.

    Args:
        promise: A result, or the path of a best-config.json.
        clock: Of the step times; by default the device's.

    Raises:
        InputError: It can't be read, or has no measurement.
    """

    def __init__(self, promise: ResultData | str | Path, *, clock: Clock | None = None) -> None:
        result = promise if isinstance(promise, ResultData) else read_result(promise)
        expected = Promise.of(result)
        if expected is None:
            raise InputError("the result has no measurement of its best configuration to compare with")
        self._result = result
        self._promise = expected
        self._given_clock = clock
        self.report: Production | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget an earlier training."""
        self._clock = self._given_clock or (CudaClock() if args.device.type == "cuda" else HostClock())
        self._pending: list[_Step] = []
        self._latest: _Step | None = None
        self._mark: Any = None
        self._begun: Any = None
        self._micro_steps = 0
        self._steps, self._total_s, self._waited_s = 0, 0.0, 0.0
        self._discarded = 0
        self._watch = noise.watch(str(args.device))
        self._watch.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out the first step of an epoch."""
        self._mark = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark that the data of a step are there."""
        self._begun = self._clock.mark()
        self._micro_steps = 1

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the micro-batches of a step."""
        self._micro_steps += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a step that counts; the latest waits until it is known not to be the last of an epoch."""
        end = self._clock.mark()
        if self._latest is not None:
            self._pending.append(self._latest)
        is_whole = self._micro_steps == args.gradient_accumulation_steps
        is_steady = self._mark is not None and self._discarded >= DISCARDED_STEPS
        self._latest = _Step(self._mark, self._begun, end) if is_whole and is_steady else None
        self._discarded += 1
        self._mark = end
        if self._discarded % _LOOK_EVERY == 0:
            self._watch.look()  # while the device computes
        if len(self._pending) >= _MOST_PENDING:
            self._read()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out the time of logging, evaluating or saving, which have waited for the device anyway."""
        if self._mark is not None:
            self._read()
            self._mark = self._clock.mark()

    on_evaluate = on_save = on_log

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out the last step of an epoch, which may have fewer samples."""
        self._latest = None

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compare with the promise, print the line and write it."""
        self._read()
        self.report = self._production(args, model)
        if state.is_world_process_zero:
            tqdm.write(visible(f"autotune: {self.report}"), file=sys.stderr)  # not behind the Trainer's progress bar
            self._write(Path(args.output_dir))

    def _read(self) -> None:
        """Add up the times between the pending marks."""
        if not self._pending:
            return
        self._clock.settle()
        for step in self._pending:
            self._total_s += self._clock.seconds(step.start, step.end)
            self._waited_s += self._clock.seconds(step.start, step.begun)
        self._steps += len(self._pending)
        self._pending = []

    def _production(self, args: Any, model: Any) -> Production:
        result, promise = self._result, self._promise
        samples = args.train_batch_size * args.gradient_accumulation_steps * _data_parallel(args)
        share = self._waited_s / self._total_s if self._total_s else None
        reasons = [*other_arguments(result, args), *other_course(promise, samples, share)]
        reasons += other_model(result, model) if model is not None else ()
        with contextlib.suppress(AutotuneError):  # a device that NVML doesn't know is no reason
            here = detect(str(args.device))
            reasons += other_machine(result, here.name, here.cores, installed_versions())
        return Production(
            when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            model=result.workload.model.name,
            config_id=result.best.config.config_id,
            promise=promise,
            steps=self._steps,
            samples_per_step=samples,
            samples_per_second=self._steps * samples / self._total_s if self._total_s else None,
            data_wait_share=share,
            memory=_peak(args.device),
            reasons=(*reasons, *self._watch.conditions().warnings()),
        )

    def _write(self, folder: Path) -> None:
        """Add a line to the file in the output directory; a file that can't be written doesn't end a training."""
        assert self.report is not None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / FILE_NAME).open("a") as file:
                file.write(self.report.model_dump_json() + "\n")
        except OSError as error:
            sys.stderr.write(visible(f"autotune: {folder / FILE_NAME} can't be written: {error.strerror}") + "\n")


def _data_parallel(args: Any) -> int:
    """Return the number of ranks that see different samples."""
    shared = os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1")  # which accelerate's launcher sets as well
    others = getattr(getattr(args, "parallelism_config", None), "non_data_parallel_size", shared)
    return max(1, int(args.world_size) // int(others))


def _peak(device: Any) -> Memory:
    """Return the peak memory: torch's on a GPU, otherwise that of the process."""
    if device.type != "cuda":
        return Memory(resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # it counts KiB
    import torch

    return Memory(
        allocated_bytes=torch.cuda.max_memory_allocated(device), reserved_bytes=torch.cuda.max_memory_reserved(device)
    )
