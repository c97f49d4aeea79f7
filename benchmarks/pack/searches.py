"""Whole searches, as `autotune.find` runs them: answers, trials that run out of memory, and an answer that is exported.

The exported answer trains in a plain Trainer, in turn with the trial that promised its throughput.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from export_throughput import compare, summary

import autotune
from autotune.errors import AutotuneError, NothingFitsError
from autotune.output.table import verdict_line
from autotune.search.tuner import SearchInterrupted
from autotune.tuning_result import TuningResult
from autotune.units import GIB
from autotune.values.problem import Event, Note, TrialEnded
from autotune.values.trial import TrialStatus
from pack.configurations import reference
from pack.report import Kind, story_of
from pack.session import OutOfTime, Part, Session

GRACE_S = 20.0  # a search may need this beyond its time: the launcher's start, and the trial that is running

LEAST_RATIO = 0.97  # of an exported answer's throughput to that of its trial
ROUNDS = 2
SECONDS = 5.0  # of each side in each round


class Search(NamedTuple):
    """One search of a pack."""

    name: str
    model: str
    seconds: float
    options: Mapping[str, Any]
    needs_bytes: int = 0  # device memory below which it is right to find that nothing fits
    capped: bool = False  # some trials have to run out of memory


_CAPPED = {"memory": "8GiB", "global_batch": 32, "max_trials": 4}
_CAPPED_TINY = {"memory": "170MiB", "seq_len": 64, "global_batch": 8, "max_trials": 3}

# A baseline of t5-3b takes 11 s for a step of 64 samples on a fast GPU: 16 leave time to search.
SEARCHES = {
    "t5-small": [Search("t5-small", "t5-small", 90, {"check_loss": 10}, needs_bytes=4 * GIB)],
    "bert-large-uncased": [
        Search("bert-large-uncased-8gib", "bert-large-uncased", 80, _CAPPED, needs_bytes=9 * GIB, capped=True),
        Search("bert-large-uncased", "bert-large-uncased", 80, {}, needs_bytes=10 * GIB),
    ],
    "t5-3b": [Search("t5-3b", "t5-3b", 150, {"global_batch": 16}, needs_bytes=56 * GIB)],
    "tiny": [
        Search("tiny", "tiny-llama", 30, {"seq_len": 16, "max_trials": 1}),
        Search("tiny-170mib", "wide-llama", 40, _CAPPED_TINY, capped=True),
    ],
}


def parts_of(models: list[str]) -> list[Part]:
    """Return the parts that search for these models."""
    return [
        Part(search.name, f"a search for {search.model}", search.seconds, functools.partial(run_search, search))
        for name in dict.fromkeys(models)
        for search in SEARCHES[name]
    ]


def run_search(search: Search, session: Session) -> TuningResult | None:
    """Run one search and keep its answer; whoever waits for it may raise OutOfTime."""
    report, name = session.report, search.name

    def listen(event: Event) -> None:
        """Keep each trial with the peak that was seen from outside."""
        if isinstance(event, Note):
            print(f"  {event.text}", flush=True)
        elif isinstance(event, TrialEnded):
            seen = session.observed_bytes()
            story = story_of(session.part, event.result, observed_bytes=seen, changes=event.changes)
            report.trial(story, event.result)
        session.watch.reset()

    status, answer, right = "found", None, False
    try:
        answer = autotune.find(
            reference(search.model, session.hardware, session.scratch),
            device=session.hardware.device,
            effort="quick",
            max_time=max(GRACE_S, session.seconds - GRACE_S),
            run_dir=session.scratch / f"search-{name}",
            record=False,
            observer=listen,
            **search.options,
        )
    except SearchInterrupted as error:
        if not isinstance(error.__context__, OutOfTime):
            raise KeyboardInterrupt from None  # somebody wants all of this to end
        status, answer = "out of time", error.result
    except AutotuneError as error:
        status = f"{type(error).__name__}: {error}"
        right = isinstance(error, NothingFitsError) and session.hardware.memory_bytes < search.needs_bytes
    report.note(status=status)
    if answer is None:
        report.check(f"{name}: an answer", right, status)
        return None
    answer.save(report.directory / f"{name}.json")
    report.note(
        verdict=answer.verdict,
        speedup=answer.speedup.model_dump(mode="json") if answer.speedup else None,
        best=answer.best.config.model_dump(mode="json"),
        loss_check=answer.loss_check.model_dump(mode="json") if answer.loss_check else None,
        notes=answer.notes,
    )
    report.check(f"{name}: an answer", True, f"{status}, {verdict_line(answer)}")
    if search.capped:
        ended = [story.status for story in report.stories if story.part == session.part]
        out, done = ended.count(TrialStatus.OUT_OF_MEMORY), ended.count(TrialStatus.COMPLETED)
        detail = f"{out} of {len(ended)} trials ran out of memory, {done} completed"
        report.check(f"{name}: the budget is enforced, and the search goes on", out > 0 and done > 0, detail)
    return answer


def train_exported(session: Session) -> None:
    """Compare the first answer there is, or that of a search made for it."""
    report, path = session.report, None
    if session.searches:
        answers = [report.directory / f"{name}.json" for name in session.searches]
        path = next((answer for answer in answers if answer.exists()), None)
        if path is None:
            first = next(s for found in SEARCHES.values() for s in found if s.name == session.searches[0])
            path = answers[0] if run_search(first, session) is not None else None
    if path is None:
        report.check("an exported result trains", False, "no answer to export")
        return
    session.end_runner()  # the device is the compared ones' alone
    rounds = compare(path, session.hardware, count=ROUNDS, seconds=SECONDS)
    found = summary(autotune.load(path), rounds)
    report.note(answer=path.name, **found)
    report.check("an exported result trains", all(r.exported > 0 for r in rounds), path.name)
    shown = ", ".join(f"{r.ratio:.3f}" for r in rounds)
    shown = f"{found['ratio']:.3f} of the measured throughput (rounds: {shown}), of {LEAST_RATIO} at the least"
    fast = found["ratio"] >= LEAST_RATIO
    report.check("an exported result is as fast as its trial", fast, shown, Kind.VALUES_OR_TIME)
