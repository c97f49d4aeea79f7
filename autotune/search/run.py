"""Conducts a search that is planned, to its end: with who keeps its trials, who is told, and what predicts.

Called by `autotune.api`, for a search that begins and for one that goes on.
"""

from __future__ import annotations

from pathlib import Path

from autotune.errors import InputError
from autotune.integrations import tracking
from autotune.planning.plan import SearchPlan
from autotune.search.backend import Crew
from autotune.search.cost_model import cost_model, learn
from autotune.search.recall import Recall
from autotune.search.tuner import SearchInterrupted, Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.storage.writer import RecordWriter, record_writer
from autotune.value import check_savable
from autotune.values.events import Note, Observer, Phase, PhaseBegan
from autotune.values.result import ResultData
from autotune.values.stopwatch import Stopwatch

# The file in which the user wants the answer beside the run directory: looked at first, written last. Called by
# `autotune.api`, so that it holds for Python and the command line, and for who goes on with a search.


def wanted_file(output: str | Path | None) -> str | None:
    """Return where the answer is wanted, from wherever the search is gone on with; fail in second 0, not after an hour.

    Raises:
        InputError: It can't be written.
    """
    if output is None:
        return None
    path = Path(output).absolute()
    try:
        check_savable(path)
    except OSError as error:
        raise _refused(Path(output), error) from None
    return str(path)


def deliver(result: ResultData | None, path: str | None) -> None:
    """Write the answer, if there is one and it is wanted somewhere.

    Raises:
        InputError: It can't be written any more.
    """
    if result is None or path is None:
        return
    try:
        result.save(path)
    except OSError as error:
        raise _refused(Path(path), error) from None


def _refused(path: Path, error: OSError) -> InputError:
    return InputError(f"--output {path}: can't be written: {error.strerror}")


def conduct(
    plan: SearchPlan, directory: RunDirectory, crew: Crew, observer: Observer, stopwatch: Stopwatch
) -> ResultData:
    """Run a search or a recording to its end; what was observed is kept for the next one, however it ends.

    Raises:
        NothingFitsError, InfrastructureError, SearchInterrupted: As the conductor.
        InputError: The answer can't be written where it is wanted beside the run directory.
    """
    with (
        tracking.trackers_of(plan, directory, observer) as trackers,
        record_writer(plan, directory, trackers) as writer,
    ):
        try:
            if plan.exhaustive:
                result = Tuner(plan, directory, crew.pool, writer).run()
            else:
                result = _search(plan, directory, crew, writer, stopwatch)
        except SearchInterrupted as interrupted:
            deliver(interrupted.result, plan.output)
            raise
        result = trackers.end(writer.end(result))
    deliver(result, plan.output)
    return result


def _search(
    plan: SearchPlan, directory: RunDirectory, crew: Crew, writer: RecordWriter, stopwatch: Stopwatch
) -> ResultData:
    stopwatch.enter("tracing")
    writer(PhaseBegan(phase=Phase.PREDICTING))
    model = cost_model(plan, crew.asker, directory.path, writer)
    stopwatch.enter("planning")
    recall = Recall(plan, writer.earlier())
    if recall.foreword is not None and not directory.results():
        writer(Note(text=recall.foreword))
    starting = stopwatch.laps()
    try:
        return Tuner(plan, directory, crew.pool, writer, model=model, recall=recall, starting=starting).run()
    finally:
        if not plan.is_shared:  # what was disturbed would mislead the next search
            learn(plan, model, directory.results())
