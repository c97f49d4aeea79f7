"""Everything about autotune that only a CUDA device can show, in one command and a quarter of an hour.

    python benchmarks/gpu_pack.py [--models t5-small,bert-large-uncased,t5-3b] [--out DIR]
    python benchmarks/gpu_pack.py --list                                    # the parts, and the seconds of each
    python benchmarks/gpu_pack.py --parts compile,sharing
    python benchmarks/gpu_pack.py --device cpu --models tiny --out DIR      # what a CPU can do of it

Each part stands alone, and has the seconds that `--list` tells and what the parts before it have left of theirs; one
that fails, or is out of time, doesn't keep the others from running. `--deadline` gives all of them more, in proportion,
where a machine is slow. Checks of the kind "values/time" are settled by a real GPU alone; elsewhere, as on the stand-in
for CUDA of tests/fakecuda, they are kept and not judged. A pack that is killed has lost nothing but its last trial.

    DIR/pack.jsonl         a line for all that was found as it was found; every trial in full
    DIR/summary.json       machine, versions, checks, and a line for every trial
    DIR/<search>.json      the answer of each search, as `autotune.load` reads it

Exit codes: 0 all checks that could be judged passed, 1 one has failed or there was no time for it, 2 bad input, 3 no
such device, 130 interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from pack.check import Check, Ground, ground_of
from pack.memory_watch import MemoryWatch
from pack.part import OutOfTime, Part, alarm
from pack.report import Report
from pack.searches import SEARCHES, parts_of
from pack.session import Session
from pack.stories import TOLERANCE_BYTES, check_trials
from pack.table import DEADLINE_S, parts
from provenance import results_path

from autotune.errors import AutotuneError
from autotune.units import show_memory
from autotune.values.hardware import Hardware, detect

LEAST_S = 1.0  # a part with less isn't begun


def main() -> int:
    """Run the pack; return the exit code."""
    options = parse_options()
    if options.list:
        for part in options.parts:
            needs = f"; needs {' and '.join(need.name for need in part.needs)}" if part.needs else ""
            print(f"{part.name:24}{part.seconds:4.0f} s  {part.shows}{needs}")
        return 0
    try:
        hardware = detect(options.device)
    except AutotuneError as error:
        print(f"gpu_pack: {error}", file=sys.stderr)
        return error.exit_code
    report = Report(options.out or _usual_directory(hardware), hardware)
    memory = show_memory(hardware.memory_bytes)
    print(f"{hardware.name}, {memory}, {report.ground}; results in {report.directory}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ended = "at its end"
    searches = tuple(part.name for part in parts_of(options.models))
    try:
        with (
            tempfile.TemporaryDirectory() as scratch,
            MemoryWatch(hardware) as watch,
            Session(hardware, report, watch, Path(scratch), searches) as session,
        ):
            run(options.parts, session, options.deadline)
    except KeyboardInterrupt:
        ended = "interrupted"
    report.begin("all")
    for check in check_trials(report.stories) if report.stories else ():
        report.check(check)
    report.check(Check("all parts were run", ended == "at its end", f"{ended} after {report.elapsed_s():.0f} s"))
    report.finish()
    return 130 if ended == "interrupted" else 0 if report.passed else 1


def run(chosen: Sequence[Part], session: Session, deadline_s: float) -> None:
    """Go through the parts, each in the time that is its own or left over."""
    scale = deadline_s / DEADLINE_S
    possible = [part for part in chosen if not _passed_over(part, session)]
    before = session.watch.used_bytes()
    for number, part in enumerate(possible):
        promised = sum(later.seconds for later in possible[number + 1 :]) * scale
        run_part(part, session, deadline_s - session.report.elapsed_s() - promised, part.seconds * scale)
    session.end_runner()
    session.report.begin("all")
    left = session.watch.used_bytes() - before
    session.report.check(Check("the device's memory is back", left < TOLERANCE_BYTES, f"{left / 2**20:+.0f} MiB"))


def run_part(part: Part, session: Session, seconds: float, usual_s: float) -> None:
    """Run one part, which should take `usual_s` and is ended after `seconds`; whatever goes wrong is a failed check."""
    print(f"{part.name}: {part.shows}, at most {seconds:.0f} s", flush=True)
    began = time.monotonic()
    session.begin(part.name, min(seconds, usual_s))
    try:
        if seconds < LEAST_S:
            raise OutOfTime
        with alarm(seconds):
            part.run(session)
    except OutOfTime:
        session.report.check(Check(f"{part.name}: ends in its time", False, f"no time left after {seconds:.0f} s"))
    except Exception as error:
        traceback.print_exc()
        session.report.check(Check(part.name, False, f"{type(error).__name__}: {error}"))
    session.report.note(duration_s=round(time.monotonic() - began, 1))


def _passed_over(part: Part, session: Session) -> bool:
    """Note what a part needs that isn't here, if anything is."""
    needed = part.missing(session.hardware)
    if needed is not None:
        session.begin(part.name, 0.0)
        session.report.note(passed_over=f"needs {needed}")
        print(f"{part.name}: passed over, it needs {needed}", flush=True)
    return needed is not None


def _usual_directory(hardware: Hardware) -> Path:
    standin = ground_of(hardware) is Ground.STAND_IN
    return results_path("pack", hardware.model_copy(update={"name": "stand-in, no GPU"}) if standin else hardware)


def parse_options() -> argparse.Namespace:
    """Read the command line; `parts` are those that are to run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: %(default)s)")
    parser.add_argument(
        "--models",
        type=_words,
        default=["t5-small", "bert-large-uncased", "t5-3b"],
        help=f"to search for, of {', '.join(SEARCHES)}, with commas between (default: all but tiny)",
    )
    parser.add_argument("--parts", type=_words, help="these alone, with commas between (default: all)")
    parser.add_argument("--list", action="store_true", help="tell the parts and how long each takes on a GPU")
    parser.add_argument("--out", type=Path, help="directory of the results (default: in benchmarks/results)")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds in all (default: %(default)s)")
    options = parser.parse_args()
    for name in options.models:
        if name not in SEARCHES:
            parser.error(f"--models {name}: expected some of {', '.join(SEARCHES)}")
    every = {part.name: part for part in parts(options.models)}
    for name in options.parts or ():
        if name not in every:
            parser.error(f"--parts {name}: expected some of {', '.join(every)}")
    options.parts = [part for part in every.values() if options.parts is None or part.name in options.parts]
    return options


def _words(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
