"""Whole searches, as `autotune.find` runs them: answers, and trials that run out of memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import autotune
from autotune.errors import AutotuneError, NothingFitsError
from autotune.output.table import verdict_line
from autotune.search.tuner import SearchInterrupted
from autotune.tuning_result import TuningResult
from autotune.units import GIB
from autotune.values.problem import Event, Note, TrialEnded
from pack.check import Check
from pack.models import reference
from pack.part import OutOfTime, Part
from pack.session import Session
from pack.stories import ran_out_and_went_on, story_of

GRACE_S = 20.0  # a search may need this beyond its time: the launcher's start, and the trial that is running


class Search(NamedTuple):
    """One search of a pack."""

    name: str
    model: str
    seconds: float
    options: Mapping[str, Any]
    needs_bytes: int = 0  # device memory below which it is right to find that nothing fits
    capped: bool = False  # some trials have to run out of memory


# A baseline of t5-3b takes 11 s for a step of 64 samples on a fast GPU: 16 leave time to search.
SEARCHES = {
    "t5-small": [Search("t5-small", "t5-small", 90, {"check_loss": 10}, needs_bytes=4 * GIB)],
    "bert-large-uncased": [
        Search(
            "bert-large-uncased-8gib",
            "bert-large-uncased",
            80,
            {"memory": "8GiB", "global_batch": 32, "max_trials": 4},
            needs_bytes=9 * GIB,
            capped=True,
        ),
        Search("bert-large-uncased", "bert-large-uncased", 80, {}, needs_bytes=10 * GIB),
    ],
    "t5-3b": [Search("t5-3b", "t5-3b", 150, {"global_batch": 16}, needs_bytes=56 * GIB)],
    "tiny": [
        Search("tiny", "tiny-llama", 30, {"seq_len": 16, "max_trials": 1}),
        Search(
            "tiny-170mib",
            "wide-llama",
            40,
            {"memory": "170MiB", "seq_len": 64, "global_batch": 8, "max_trials": 3},
            capped=True,
        ),
    ],
}


def parts_of(models: list[str]) -> list[Part]:
    """Return the parts that search for these models."""
    wanted = [search for name in dict.fromkeys(models) for search in SEARCHES[name]]
    return [
        Part(search.name, f"a search for {search.model}", search.seconds, functools.partial(run_search, search))
        for search in wanted
    ]


def search_named(name: str) -> Search:
    """Return a search by its name."""
    return next(s for searches in SEARCHES.values() for s in searches if s.name == name)


def run_search(search: Search, session: Session) -> TuningResult | None:
    """Run one search and keep its answer; whoever waits for it may raise OutOfTime."""
    status, answer, right = "found", None, False
    try:
        answer = autotune.find(
            reference(search.model, session.hardware, session.scratch),
            device=session.hardware.device,
            effort="quick",
            max_time=max(GRACE_S, session.seconds - GRACE_S),
            run_dir=session.scratch / f"search-{search.name}",
            record=False,
            observer=_observer(session),
            **search.options,
        )
    except SearchInterrupted as error:
        if not isinstance(error.__context__, OutOfTime):
            raise KeyboardInterrupt from None  # somebody wants all of this to end
        status, answer = "out of time", error.result
    except AutotuneError as error:
        status = f"{type(error).__name__}: {error}"
        right = isinstance(error, NothingFitsError) and session.hardware.memory_bytes < search.needs_bytes
    session.report.note(status=status)
    if answer is None:
        session.report.check(Check(f"{search.name}: an answer", right, status))
        return None
    _keep_answer(search, answer, session, status)
    if search.capped:
        session.report.check(ran_out_and_went_on(session.part, session.report.stories))
    return answer


def _keep_answer(search: Search, answer: TuningResult, session: Session, status: str) -> None:
    answer.save(session.report.directory / f"{search.name}.json")
    session.report.note(
        verdict=answer.verdict,
        speedup=answer.speedup.model_dump(mode="json") if answer.speedup else None,
        best=answer.best.config.model_dump(mode="json"),
        loss_check=answer.loss_check.model_dump(mode="json") if answer.loss_check else None,
        notes=answer.notes,
    )
    session.report.check(Check(f"{search.name}: an answer", True, f"{status}, {verdict_line(answer)}"))


def _observer(session: Session) -> Callable[[Event], None]:
    """Return what listens to a search: it keeps each trial with the peak that was seen from outside."""

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            print(f"  {event.text}", flush=True)
        elif isinstance(event, TrialEnded):
            seen = session.observed_bytes()
            session.report.trial(
                story_of(session.part, event.result, observed_bytes=seen, changes=event.changes), event.result
            )
        session.watch.reset()

    return listen
