"""Searches of the lasting record, of which a test names only what it is about."""

from __future__ import annotations

from typing import Any

import optuna
from factories import make_config, make_plan, make_request, make_result

from autotune.planning.plan import SearchPlan
from autotune.storage.record import NUMBER, RECORDED, Record
from autotune.storage.recorded import RecordedSearch, RecordedTrial, key_of
from autotune.values.config import TrainConfig
from autotune.values.trial import Outcome, Purpose

DAY = "2026-11-20"
MOMENT = f"{DAY}T12:00:00+00:00"


def recorded_trial(
    config: TrainConfig | None = None,
    outcome: Outcome | float = 10.0,
    *,
    ended: str = MOMENT,
    memory_bytes: int | None = None,
    **fields: Any,
) -> RecordedTrial:
    """A trial; a bare number is the throughput it measured."""
    limits = make_request().limits
    if memory_bytes is not None:
        limits = limits.model_copy(update={"memory_bytes": memory_bytes})
    return RecordedTrial.of(make_result(config or make_config(), outcome, limits=limits, **fields), ended)


def recorded_search(*trials: RecordedTrial, plan: SearchPlan | None = None, **fields: Any) -> RecordedSearch:
    """A search of a plan that began with its baseline at 10 samples a second, unless its trials say otherwise."""
    plan = plan or make_plan()
    baseline = recorded_trial(plan.baseline, purpose=Purpose.BASELINE)
    found = trials if any(t.purpose is Purpose.BASELINE for t in trials) else (baseline, *trials)
    defaults = {
        "id": "a",
        "key": key_of(plan),
        "model": plan.workload.model.name,
        "shape": "causal-lm, sequence 128, batch 16",
        "device": plan.hardware.name,
        "started": MOMENT,
        "run_directory": "/runs/tiny",
        "trials": tuple(t.model_copy(update={"number": n}) for n, t in enumerate(found)),
    }
    return RecordedSearch(**{**defaults, **fields})


def stored(*trials: RecordedTrial) -> list[optuna.trial.FrozenTrial]:
    """Trials as a record has them, but for their parameters."""
    attributes = [{NUMBER: t.number, RECORDED: t.model_dump(mode="json")} for t in trials]
    return [optuna.create_trial(value=1.0, user_attrs=each) for each in attributes]


def keep(database: Record, *searches: RecordedSearch) -> None:
    """Write whole searches."""
    for search in searches:
        database.write(search, stored(*search.trials))
