"""The searches of the lasting record, and the key under which searches compare.

Two searches have the same key if a trial of one means the same in the other: the same architecture, the same step, the
same device, the same libraries. Names, paths, the seed, the memory budget and what may change are not in it.
"""

import statistics

from pydantic import Field

from autotune.value import Value, digest_of
from autotune.values.problem import Problem
from autotune.values.trial import Purpose, TrialResult
from autotune.values.workload import WITHOUT_COST, Workload
from autotune.version import __version__


def key_of(problem: Problem) -> str:
    """Return the key of a search. Code of a model's own is known by name and revision."""
    workload, hardware, spec, facts = problem.workload, problem.hardware, problem.workload.model, problem.facts
    # These say where the workload comes from, or count otherwise: of real data the lengths do.
    which = {"free_bytes", "device", "count", "peers", "visible", "versions"}  # of like devices, and their libraries
    without = {"model", "seed", "dataset", "text_field", "fixed_arguments", "own_step", "own_code"}
    return digest_of(
        {
            "type": spec.model_type,
            "figures": facts.architecture or spec.config,
            "size": facts.parameters,
            "code": [spec.name, spec.revision] if spec.trust_remote_code else None,
            "frozen": spec.freeze_vision,
            "step": workload.model_dump(mode="json", exclude=without),
            "real": workload.dataset is not None,
            "fixed": {n: value for n, value in workload.fixed_arguments.items() if n not in WITHOUT_COST},
            "hardware": hardware.model_dump(mode="json", exclude=which),
            "versions": {n: version for n, version in hardware.versions.items() if n != "optuna"},
            "autotune": __version__,
        }
    )


def without_places(result: TrialResult) -> TrialResult:
    """Return a trial as others may read it: without where the user's data and code lie."""
    known = result.request.workload
    spec = known.model.model_copy(update={"reference": known.model.name, "config": {}, "path": None})
    kept = ("task", "sequence_length", "target_length", "global_batch_size")
    workload = Workload(model=spec, **{name: getattr(known, name) for name in kept})
    changed = {"request": result.request.model_copy(update={"workload": workload}), "warnings": (), "place": ""}
    return result.model_copy(update=changed)


def read_recorded(text: str) -> TrialResult:
    """Return a trial of a record; ValueError: another version wrote it, or no trial has its figures."""
    result = TrialResult.model_validate_json(text)
    if not all(0 <= s < 1e11 for s in (result.duration_s, result.began)):
        raise ValueError("a damaged trial")
    return result


class RecordedSearch(Value):
    """A search with its trials; it has no answer while it runs, or if it was killed."""

    id: str = Field(description="of the run directory")
    key: str = Field(description="the same for searches whose trials compare")
    model: str = Field(description="its name then")
    shape: str = Field(description="the workload in words")
    device: str
    started: str = Field(description="UTC, ISO 8601")
    run_directory: str
    verdict: str | None = None
    best_config_id: str | None = Field(default=None, description="of the answer")
    trials: tuple[TrialResult, ...] = ()

    @property
    def best_samples_per_second(self) -> float | None:
        """The answer's rate by its final trials, or else by its trial of the search; without an answer the highest."""
        seen = [(t.request, m.samples_per_second) for t in self.trials if (m := t.measurement) is not None]
        rates = [(request.purpose, request.config.config_id == self.best_config_id, rate) for request, rate in seen]
        finals = [rate for purpose, is_best, rate in rates if is_best and purpose is Purpose.FINAL]
        explored = [(is_best, rate) for purpose, is_best, rate in rates if purpose.explores]
        return statistics.harmonic_mean(finals) if finals else max(explored, default=(False, None))[1]
