"""Everything about autotune that only a CUDA device can show, in one command and under eight minutes.

    python benchmarks/gpu_pack.py [--models t5-small,bert-large-uncased,t5-3b] [--out DIR]
    python benchmarks/gpu_pack.py --device cpu --models tiny --out DIR      # the same steps, anywhere, in a minute

Looks at the machine, at how trials are started, searches for each model (one search under a small memory budget, so
that trials really run out of memory), compares the peaks that trials report with those seen from outside, and trains
with an exported result. Everything is written at once: a pack that is killed has lost nothing but its last trial.

    DIR/summary.json       machine, versions, checks, and a line for every trial
    DIR/trials.jsonl       every trial in full
    DIR/<search>.json      the answer of each search, as `autotune.load` reads it

Exit codes: 0 all checks passed, 1 one has failed or there was no time for it, 2 bad input, 3 no such device,
130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from device_memory import MemoryWatch
from export_throughput import steps_for, train
from gpu_checks import TOLERANCE_BYTES, Check, Story, check_trials
from pack_report import Report
from provenance import results_path

import autotune
from autotune.checks import SoakTask
from autotune.doctor import examine
from autotune.errors import AutotuneError, NothingFitsError
from autotune.events import Event, Note, TrialEnded
from autotune.execution.environment import launcher_environment
from autotune.execution.launch import launch_command
from autotune.hardware import Hardware, detect
from autotune.output.table import measurement_detail, trial_line, verdict_line
from autotune.result import TuningResult
from autotune.trial import Failure, TrialResult
from autotune.tuner import SearchInterrupted
from autotune.units import GIB, show_memory

DEADLINE_S = 465.0
GRACE_S = 40.0  # a search may need this beyond its time: the launcher's start, and the trial that is running
LEAST_S = 15.0  # a search shorter than this tells nothing
EXPORT_S = 30.0  # kept for the last step
LAUNCHER_START_S = 120.0

TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


class OutOfTime(KeyboardInterrupt):
    """The alarm; a search takes it for a Ctrl-C and hands back the best so far."""


class Search(NamedTuple):
    """One search of the pack."""

    name: str
    model: str
    seconds: float
    options: dict[str, Any]
    needs_bytes: int = 0  # device memory below which it is right to find that nothing fits
    capped: bool = False  # some trials have to run out of memory


# A baseline of t5-3b takes 11 s for a step of 64 samples on a fast GPU: 16 leave time to search.
SEARCHES = {
    "t5-small": [Search("t5-small", "t5-small", 60, {}, needs_bytes=4 * GIB)],
    "bert-large-uncased": [
        Search(
            "bert-large-uncased-8gib",
            "bert-large-uncased",
            45,
            {"memory": "8GiB", "global_batch": 32, "max_trials": 4},
            needs_bytes=9 * GIB,
            capped=True,
        ),
        Search("bert-large-uncased", "bert-large-uncased", 75, {}, needs_bytes=10 * GIB),
    ],
    "t5-3b": [Search("t5-3b", "t5-3b", 150, {"global_batch": 16}, needs_bytes=56 * GIB)],
    "tiny": [
        Search("tiny", "tiny-llama", 20, {"seq_len": 16, "max_trials": 1}),
        Search(
            "tiny-170mib",
            "wide-llama",
            25,
            {"memory": "170MiB", "seq_len": 64, "global_batch": 8, "max_trials": 3},
            capped=True,
        ),
    ],
}


def main() -> int:
    """Run the pack; return the exit code."""
    options = parse_options()
    try:
        hardware = detect(options.device)
    except AutotuneError as error:
        print(f"gpu_pack: {error}", file=sys.stderr)
        return error.exit_code
    report = Report(options.out or results_path("pack", hardware), hardware)
    print(f"{hardware.name}, {show_memory(hardware.memory_bytes)}; results in {report.directory}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ended = "at its end"
    try:
        with tempfile.TemporaryDirectory() as scratch, _alarm(options.deadline):
            run(options, hardware, report, Path(scratch))
    except OutOfTime:
        ended = "out of time"
    except KeyboardInterrupt:
        ended = "interrupted"
    for check in check_trials(report.stories, capped=[s.name for s in options.searches if s.capped]):
        report.check(check)
    report.check(Check("all steps were taken", ended == "at its end", f"{ended} after {report.elapsed_s():.0f} s"))
    report.note("finished", True)
    return 130 if ended == "interrupted" else 0 if report.passed else 1


def run(options: argparse.Namespace, hardware: Hardware, report: Report, scratch: Path) -> None:
    """Go through all steps; one that fails doesn't keep the others from running."""
    step(report, "doctor", lambda: look_at_machine(hardware, report))
    step(report, "launcher", lambda: start_launcher(hardware, report))
    with MemoryWatch(hardware) as watch:
        before = watch.used_bytes()
        for search in options.searches:
            action = functools.partial(run_search, search, hardware, report, watch, scratch, options.deadline)
            step(report, search.name, action)
        left = watch.used_bytes() - before
        report.check(Check("the device's memory is back", left < TOLERANCE_BYTES, f"{left / 2**20:+.0f} MiB"))
    step(report, "export", lambda: train_exported(options, hardware, report, scratch))


def step(report: Report, name: str, action: Callable[[], None]) -> None:
    """Do one step; whatever goes wrong is a failed check."""
    try:
        action()
    except Exception as error:
        traceback.print_exc()
        report.check(Check(name, False, f"{type(error).__name__}: {error}"))


def look_at_machine(hardware: Hardware, report: Report) -> None:
    """Ask the doctor; a device that torch can't use ends all hope."""
    diagnosis = examine(hardware.device)
    report.note("doctor", diagnosis.model_dump(mode="json", include={"machine", "findings"}))
    if not hardware.is_cpu:
        finding = next(f for f in diagnosis.findings if f.name in ("CUDA device", "torch"))
        report.check(Check("torch can use the device", finding.available, finding.detail))


def start_launcher(hardware: Hardware, report: Report) -> None:
    """Start the process that trials come from and ask whether it may fork them."""
    replies, write_end = os.pipe()
    process = subprocess.Popen(
        launch_command("--device", hardware.device, "--replies", str(write_end)),
        stdin=subprocess.PIPE,
        pass_fds=(write_end,),
        env=launcher_environment(hardware.device, {}),
    )
    os.close(write_end)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(replies, selectors.EVENT_READ)
            ready = json.loads(os.read(replies, 1 << 16) or b"null") if selector.select(LAUNCHER_START_S) else None
    finally:
        process.kill()
        process.communicate()
        os.close(replies)
    report.note("launcher", ready)
    detail = f"ready after {ready['import_s']:.1f} s" if ready else "the launcher did not start"
    report.check(Check("trials are forked from one process", bool(ready and ready["forkable"]), detail))


def run_search(
    search: Search, hardware: Hardware, report: Report, watch: MemoryWatch, scratch: Path, deadline_s: float
) -> None:
    """Run one search and keep its answer."""
    left = deadline_s - report.elapsed_s() - EXPORT_S
    seconds = min(search.seconds, left - GRACE_S / 2)
    if seconds < LEAST_S:
        report.check(Check(f"{search.name}: an answer", False, f"no time: {left:.0f} s left"))
        return
    print(f"{search.name}: at most {seconds:.0f} s", flush=True)
    began, status, answer, right = time.monotonic(), "found", None, False
    try:
        with _alarm(min(seconds + GRACE_S, left)):
            answer = autotune.find(
                _reference(search.model, scratch),
                device=hardware.device,
                effort="quick",
                max_time=seconds,
                run_dir=scratch / search.name,
                record=False,
                observer=_observer(search, hardware, report, watch),
                **search.options,
            )
    except OutOfTime:
        status = "out of time before the first trial"
    except SearchInterrupted as error:
        if not isinstance(error.__context__, OutOfTime):
            raise KeyboardInterrupt from None  # somebody wants all of this to end
        status, answer = "out of time", error.result
    except AutotuneError as error:
        status = f"{type(error).__name__}: {error}"
        right = isinstance(error, NothingFitsError) and hardware.memory_bytes < search.needs_bytes
    report.search(search.name).update(status=status, duration_s=round(time.monotonic() - began, 1))
    if answer is None:
        report.check(Check(f"{search.name}: an answer", right, status))
    else:
        _keep_answer(search, answer, report, status)


def _keep_answer(search: Search, answer: TuningResult, report: Report, status: str) -> None:
    answer.save(report.directory / f"{search.name}.json")
    record = report.search(search.name)
    record.update(
        verdict=answer.verdict,
        speedup=answer.speedup.model_dump(mode="json") if answer.speedup else None,
        best=answer.best.config.model_dump(mode="json"),
        notes=answer.notes,
    )
    report.check(Check(f"{search.name}: an answer", True, f"{status}, {verdict_line(answer)}"))


def _observer(search: Search, hardware: Hardware, report: Report, watch: MemoryWatch) -> Callable[[Event], None]:
    """Return what listens to a search: it keeps each trial with the peak that was seen from outside."""

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            print(f"  {event.text}", flush=True)
        elif isinstance(event, TrialEnded):
            report.trial(_story(search, event, None if hardware.is_cpu else watch.risen_bytes()), event)
        watch.reset()

    return listen


def _story(search: Search, event: TrialEnded, observed: int | None) -> Story:
    result, outcome = event.result, event.result.outcome
    detail = outcome.cause if isinstance(outcome, Failure) else measurement_detail(outcome)
    line = trial_line(result.request.number, result.status, event.changes, detail)
    seen = f", {show_memory(observed)} seen from outside" if observed is not None else ""
    return Story(
        search=search.name,
        number=result.request.number,
        status=result.status,
        budget_bytes=result.request.limits.memory_bytes,
        memory=outcome.memory,
        observed_bytes=observed,
        gave_up=_gave_up(result),
        line=f"{line}{seen} ({result.request.purpose}, {result.duration_s:.1f} s)",
    )


def _gave_up(result: TrialResult) -> bool:
    """Return whether a soak had to try a smaller evaluation batch than the first."""
    task, measured = result.request.task, result.measurement
    if not isinstance(task, SoakTask) or measured is None or measured.soaked is None:
        return False
    return measured.soaked.eval_batch_size != task.eval_batch_sizes[0]


def train_exported(options: argparse.Namespace, hardware: Hardware, report: Report, scratch: Path) -> None:
    """Train with the first answer in a plain Trainer; how fast that is, is kept and not judged."""
    seconds = min(10.0, options.deadline - report.elapsed_s() - EXPORT_S / 2)
    answers = [report.directory / f"{search.name}.json" for search in options.searches]
    path = next((a for a in answers if a.exists()), None)
    if seconds < 1 or path is None:
        report.check(Check("an exported result trains", False, "no answer to export" if seconds >= 1 else "no time"))
        return
    result = autotune.load(path)
    exported = train(path, hardware, scratch / "exported", steps_for(result, seconds))
    measured = result.best.measurement.samples_per_second if result.best.measurement else None
    report.note("export", {"answer": path.name, "exported": exported, "measured": measured})
    share = f"{exported / measured:.3f} of the measured throughput" if measured else "never measured"
    report.check(Check("an exported result trains", True, share))


def _reference(model: str, scratch: Path) -> str:
    """Return what `find` takes: a name of the catalogue, or the directory of a model that is made here."""
    made = {"tiny-llama": TINY_LLAMA, "wide-llama": {**TINY_LLAMA, "vocab_size": 32000}}
    if model not in made:
        return model
    directory = scratch / model
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(made[model]))
    return str(directory)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTime after `seconds`, or when the alarm around this one is due, whatever the code waits for."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, interrupt)
    began = time.monotonic()
    outer, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, outer or seconds))
    try:
        yield
    finally:
        rest = max(0.01, outer - (time.monotonic() - began)) if outer else 0.0
        signal.setitimer(signal.ITIMER_REAL, rest)
        signal.signal(signal.SIGALRM, previous)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: %(default)s)")
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        default=["t5-small", "bert-large-uncased", "t5-3b"],
        help=f"of {', '.join(SEARCHES)}, with commas between (default: all but tiny)",
    )
    parser.add_argument("--out", type=Path, help="directory of the results (default: in benchmarks/results)")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds in all (default: %(default)s)")
    options = parser.parse_args()
    unknown = [name for name in options.models if name not in SEARCHES]
    if unknown:
        parser.error(f"--models {unknown[0]}: expected some of {', '.join(SEARCHES)}")
    options.searches = [search for name in dict.fromkeys(options.models) for search in SEARCHES[name]]
    return options


if __name__ == "__main__":
    sys.exit(main())
