"""The searches and trials of the lasting record, and the key under which searches compare.

Two searches have the same key if a trial of one means the same in the other: the same architecture, the same step, the
same device, the same libraries. Names, paths, the seed, the memory budget and what may change are not in it.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.value import Value, digest_of
from autotune.values.problem import Problem
from autotune.values.trial import Purpose, TrialResult
from autotune.version import __version__

# Arguments that decide what is learned, not how long a step takes or what it needs.
WITHOUT_COST = frozenset(
    {"learning_rate", "weight_decay", "warmup_steps", "warmup_ratio", "lr_scheduler_type", "seed", "data_seed"}
    | {"num_train_epochs", "max_steps", "adam_beta1", "adam_beta2", "adam_epsilon"}
)


class Key(Value):
    """Digests of model, step, device and versions: one search learns from another if all four are equal."""

    model: str
    workload: str
    hardware: str
    versions: str

    @property
    def short(self) -> str:
        """The name that a user calls it by."""
        return self.digest()


def key_of(problem: Problem) -> Key:
    """Return the key of a search.

    The model is what it is by whatever name; code of its own is known by name and revision.
    """
    workload, hardware, spec, facts = problem.workload, problem.hardware, problem.workload.model, problem.facts
    model = {
        "type": spec.model_type,
        "figures": facts.architecture or spec.config,
        "size": facts.parameters,
        "code": [spec.name, spec.revision] if spec.trust_remote_code else None,
        **({"frozen": "vision"} if spec.freeze_vision else {}),
    }
    fixed = {name: value for name, value in workload.fixed_arguments.items() if name not in WITHOUT_COST}
    # They say where it comes from, or count otherwise: of real data the lengths do.
    without = {"model", "seed", "dataset", "text_field", "fixed_arguments", "own_step", "own_code"}
    step = workload.model_dump(mode="json", exclude=without if workload.images else without | {"images", "image_size"})
    device = hardware.model_copy(update={"free_bytes": 0, "device": hardware.kind, "versions": {}})
    training = {name: version for name, version in hardware.versions.items() if name != "optuna"}
    return Key(
        model=digest_of({"of": model}),
        workload=digest_of({"of": {**step, "real": workload.dataset is not None, "fixed": fixed}}),
        hardware=device.digest(leave_out=frozenset({"count"})),
        versions=digest_of({"of": {"autotune": __version__, **training}}),
    )


class RecordedTrial(Value):
    """A trial as other searches read it; the version that ran it wrote configuration and outcome."""

    retired = frozenset({"status", "peak_bytes"})

    number: NonNegativeInt
    purpose: Purpose
    config_id: str
    config: dict[str, Any]
    samples_per_second: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # else the record is damaged
    memory_bytes: PositiveInt = Field(description="the budget that it ran within")
    duration_s: float = Field(ge=0, allow_inf_nan=False)
    ended: str = Field(description="UTC, ISO 8601")
    outcome: dict[str, Any] = Field(description="the Measurement, or the Failure without its log")

    @classmethod
    def of(cls, result: TrialResult, ended: str) -> RecordedTrial:
        """Return what is recorded of a result."""
        request, measured = result.request, result.measurement
        return cls(
            number=request.number,
            purpose=request.purpose,
            config_id=request.config.config_id,
            config=request.config.model_dump(mode="json"),
            samples_per_second=measured.samples_per_second if measured else None,
            memory_bytes=request.limits.memory_bytes,
            duration_s=result.duration_s,
            ended=ended,
            outcome=json.loads(result.outcome.model_dump_json(exclude={"log_tail"})),
        )


class RecordedSearch(Value):
    """A search with its trials; it has no answer while it runs, or if it was killed."""

    retired = frozenset({"versions", "memory_bytes", "allowance", "effort", "baseline", "host"})

    id: str = Field(description="of the run directory")
    key: Key
    model: str = Field(description="its name then")
    shape: str = Field(description="the workload in words")
    device: str
    started: str = Field(description="UTC, ISO 8601")
    run_directory: str
    verdict: str | None = None
    best_config_id: str | None = Field(default=None, description="of the answer")
    speedup: float | None = None
    trials: tuple[RecordedTrial, ...] = ()

    @property
    def best_samples_per_second(self) -> float | None:
        """The answer's rate by its final trials, or else by its trial of the search; without an answer the highest."""
        rates = [(t.purpose, t.config_id == self.best_config_id, r) for t in self.trials if (r := t.samples_per_second)]
        finals = [rate for purpose, is_best, rate in rates if is_best and purpose is Purpose.FINAL]
        explored = [(is_best, rate) for purpose, is_best, rate in rates if purpose.explores]
        return statistics.harmonic_mean(finals) if finals else max(explored, default=(False, None))[1]
