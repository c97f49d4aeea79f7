"""Run directories of searches that ran in no time: the real conductor, a runner that answers from a table of factors.

The best differs from the baseline in three knobs: bf16, the optimizer and the micro-batch, whose gains overlap.
"""

import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from factories import (
    OUT_OF_MEMORY,
    Clock,
    ScriptedRunner,
    make_budget,
    make_config,
    make_measurement,
    make_plan,
    make_space_file,
)

from autotune.output.gather import gather
from autotune.planning.plan import SearchPlan
from autotune.search.tuner import Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.tuning_result import TuningResult, with_methods
from autotune.units import GIB
from autotune.values.config import TrainConfig
from autotune.values.estimate import MemoryBreakdown, Phase
from autotune.values.problem import ignore
from autotune.values.result import Breakdown, RunReport
from autotune.values.trial import Alive, Interval, Memory, Outcome, Prediction, TrialRequest, TrialStatus

BASE = make_config()
BEST = make_config(16, precision="bf16", optim="adamw_torch")

PARAMETERS = {
    "precision": ["fp32", "bf16"],
    "optim": ["adamw_torch_fused", "adamw_torch", "adafactor"],
    "per_device_train_batch_size": {"choices": [8, 16]},
}

# Gains of precision and optimizer multiply; the micro-batch of 16 brings a fifth, but with bf16 a tenth alone.
_FACTORS = {
    "precision": {"fp32": 1.0, "bf16": 1.5},
    "optim": {"adamw_torch_fused": 1.0, "adamw_torch": 1.2, "adafactor": 0.9},
}


def rate(config: TrainConfig) -> float:
    large = config.per_device_train_batch_size == 16
    growth = (1.1 if config.precision == "bf16" else 1.2) if large else 1.0
    return 10.0 * _FACTORS["precision"][config.precision] * _FACTORS["optim"][config.optim] * growth


def outcome(request: TrialRequest) -> Outcome:
    """What a trial gives: a gibibyte per eight samples of the micro-batch, half a second to start."""
    peak = request.config.per_device_train_batch_size * GIB // 8
    return make_measurement(rate(request.config), memory=Memory(resident_bytes=peak), startup_s=0.5)


def without_memory(request: TrialRequest) -> Outcome:
    """In fp32 there is no memory for 16 samples."""
    config = request.config
    if config.per_device_train_batch_size == 16 and config.precision == "fp32":
        return OUT_OF_MEMORY
    return outcome(request)


class PredictingRunner(ScriptedRunner):
    """Its requests have a prediction 10 % above what will be measured, and use 1 % of the device for each sample/s."""

    def begin(self, request: TrialRequest) -> None:
        predicted = 1.1 * rate(request.config)
        prediction = Prediction(samples_per_second=predicted, peak_bytes=int(1.1 * GIB), mfu=0.01 * predicted)
        super().begin(request.model_copy(update={"prediction": prediction}))


def nothing_helps(request: TrialRequest) -> Outcome:
    """All are as fast as the baseline."""
    return outcome(request.model_copy(update={"config": BASE}))


def make_search(
    directory: Path, told: Callable[[TrialRequest], Outcome] = outcome, *, finalists: int = 1
) -> tuple[SearchPlan, TuningResult]:
    """A finished search in `directory`, as `find` leaves it."""
    kept, plan, result = _searched(told, finalists)
    shutil.copytree(kept, directory, dirs_exist_ok=True)
    return plan, result


@functools.cache
def _searched(told: Callable[[TrialRequest], Outcome], finalists: int) -> tuple[Path, SearchPlan, TuningResult]:
    """A search takes seconds: each is done once, and copied."""
    directory = Path(tempfile.mkdtemp(dir=os.environ["FINISHED_SEARCHES"]))
    budget = make_budget(max_trials=20, finalists=finalists, final_rounds=2)
    plan = make_plan(space=make_space_file(PARAMETERS), baseline=BASE, budget=budget)
    run_directory = RunDirectory.create(directory)
    run_directory.write_plan(plan)
    runner = PredictingRunner(directory, told, clock=Clock())
    with mock.patch("autotune.search.sampler.PATIENCE_DRAWS", 1):  # attempts in a small space take a second each
        found = Tuner(plan, run_directory, runner, ignore, clock=Clock()).run()
        return directory, plan, with_methods(found)


def make_report(directory: Path, told: Callable[[TrialRequest], Outcome] = without_memory) -> RunReport:
    """The report of a finished search, as if it had been traced and had refused a configuration."""
    make_search(directory, told)
    report = gather(directory)
    alive = (make_alive(), make_alive(kind="weights", module="lm_head", operator="parameter", knob=None))
    parts = (
        Breakdown(name=name, predicted=make_breakdown(), measured_bytes=GIB, alive=alive)
        for name in ("baseline", "best")
    )
    refused = report.trials[0].model_copy(update={**_WITHOUT_A_TRIAL, "config": make_config(2), "cause": "too <slow>"})
    trials = (*report.trials, refused)
    return report.model_copy(update={"breakdowns": tuple(parts), "no_breakdown": None, "trials": trials})


_WITHOUT_A_TRIAL = {
    **dict.fromkeys(("purpose", "samples_per_second", "interval", "peak_bytes", "prediction")),
    **dict.fromkeys(("duration_s", "ended_s")),
    "label": "",
    "status": TrialStatus.REJECTED,
}


def make_alive(**fields) -> Alive:
    """The products of a perceptron in twelve layers."""
    defaults = {"kind": "activations", "module": "model.layers.*.mlp", "operator": "mm", "tensors": 12}
    return Alive(**{**defaults, "allocated_bytes": GIB // 10, "knob": "checkpointing", **fields})


def make_breakdown(**fields) -> MemoryBreakdown:
    """Components of 0.1 to 0.3 GiB; nothing is sent between devices, and a fifth of a gibibyte is beyond them."""
    sizes = {"weights": 0.1, "gradients": 0.1, "optimizer_state": 0.2, "activations": 0.3, "temporaries": 0.1}
    bytes_ = {f"{name}_bytes": int(size * GIB) for name, size in sizes.items()}
    allocated = sum(bytes_.values())
    interval = Interval(low=0.9 * GIB, high=1.1 * GIB)
    defaults = {
        **bytes_,
        "framework_bytes": GIB // 5,
        **dict.fromkeys(("allocated_peak_bytes", "reserved_peak_bytes"), allocated),
        "device_peak_bytes": allocated + GIB // 5,
        **dict.fromkeys(("allocated_interval", "reserved_interval", "device_interval"), interval),
        "phases": (
            Phase(name="forward and backward", operator="mm", allocated_bytes=allocated),
            Phase(name="optimizer step", operator="optimizer step", allocated_bytes=allocated // 2),
        ),
    }
    return MemoryBreakdown(**{**defaults, **fields})
