"""Trains with an exported answer in a plain Trainer, in turn with the trial that promised its throughput."""

from __future__ import annotations

from export_throughput import compare, summary

import autotune
from pack.check import Check, Kind
from pack.searches import run_search, search_named
from pack.session import Session

LEAST_RATIO = 0.97
ROUNDS = 2
SECONDS = 5.0  # of each side in each round


def train_exported(session: Session) -> None:
    """Compare the first answer there is, or that of a search made for it."""
    answers = [session.report.directory / f"{name}.json" for name in session.searches]
    path = next((a for a in answers if a.exists()), None)
    if path is None and session.searches and run_search(search_named(session.searches[0]), session) is not None:
        path = answers[0]
    if path is None:
        session.report.check(Check("an exported result trains", False, "no answer to export"))
        return
    session.end_runner()  # the device is the compared ones' alone
    rounds = compare(path, session.hardware, count=ROUNDS, seconds=SECONDS)
    found = summary(autotune.load(path), rounds)
    session.report.note(answer=path.name, **found)
    shown = ", ".join(f"{r.ratio:.3f}" for r in rounds)
    session.report.check(Check("an exported result trains", all(r.exported > 0 for r in rounds), path.name))
    session.report.check(
        Check(
            "an exported result is as fast as its trial",
            found["ratio"] >= LEAST_RATIO,
            f"{found['ratio']:.3f} of the measured throughput (rounds: {shown}), of {LEAST_RATIO} at the least",
            Kind.VALUES_OR_TIME,
        )
    )
