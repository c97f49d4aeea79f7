"""Searches of the lasting record, of which a test names only what it is about."""

import datetime
from typing import Any

import optuna
from factories import make_config, make_limits, make_plan, make_result

from autotune.planning.plan import SearchPlan
from autotune.storage.record import NUMBER, RESULT, Record
from autotune.storage.recorded import RecordedSearch, key_of
from autotune.values.config import TrainConfig
from autotune.values.trial import Outcome, Purpose, TrialResult

DAY = "2026-11-20"
MOMENT = f"{DAY}T12:00:00+00:00"


def recorded_trial(
    config: TrainConfig | None = None,
    outcome: Outcome | float = 10.0,
    *,
    began: str = MOMENT,
    memory_bytes: int | None = None,
    **fields: Any,
) -> TrialResult:
    """A trial; a bare number is the throughput it measured."""
    limits = make_limits(**({"memory_bytes": memory_bytes} if memory_bytes is not None else {}))
    result = make_result(config or make_config(), outcome, limits=limits, **fields)
    return result.model_copy(update={"began": datetime.datetime.fromisoformat(began).timestamp()})


def recorded_search(*trials: TrialResult, plan: SearchPlan | None = None, **fields: Any) -> RecordedSearch:
    """A search of a plan that began with its baseline at 10 samples a second, unless its trials say otherwise."""
    plan = plan or make_plan()
    baseline = recorded_trial(plan.baseline, purpose=Purpose.BASELINE)
    found = trials if any(t.request.purpose is Purpose.BASELINE for t in trials) else (baseline, *trials)
    requests = (trial.request.model_copy(update={"number": number}) for number, trial in enumerate(found))
    defaults = {
        "id": "a", "key": key_of(plan), "model": plan.workload.model.name, "shape": "causal-lm, sequence 128, batch 16",
        "device": plan.hardware.name, "started": MOMENT, "run_directory": "/runs/tiny",
        "trials": tuple(t.model_copy(update={"request": asked}) for t, asked in zip(found, requests, strict=True)),
    }  # fmt: skip
    return RecordedSearch(**{**defaults, **fields})


def stored(*trials: TrialResult) -> list[optuna.trial.FrozenTrial]:
    """Trials as a record has them, but for their parameters."""
    attributes = [{NUMBER: t.request.number, RESULT: t.model_dump_json()} for t in trials]
    return [optuna.create_trial(value=1.0, user_attrs=each) for each in attributes]


def keep(database: Record, *searches: RecordedSearch) -> None:
    for search in searches:
        database.write(search, stored(*search.trials))
