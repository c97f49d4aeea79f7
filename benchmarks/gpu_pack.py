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
from functools import partial
from pathlib import Path

from pack import configurations as table
from pack.configurations import Configuration
from pack.machine import check_visible, look_at_machine, preset_tf32, share_device, start_launcher
from pack.report import TOLERANCE_BYTES, Ground, Report, check_trials, ground_of
from pack.searches import SEARCHES, parts_of, train_exported
from pack.session import CUDA, DATA_SHEET, TF32, MemoryWatch, OutOfTime, Part, Session, alarm
from pack.trials import check_estimates, check_losses, run_configurations
from provenance import results_path

from autotune.errors import AutotuneError
from autotune.units import show_memory
from autotune.values.hardware import detect

DEADLINE_S = 960.0
LEAST_S = 1.0  # a part with less isn't begun


def parts(models: list[str]) -> list[Part]:
    """Return all parts, with the searches for `models`: what is quick and tells most comes first."""

    def trials(rows: Sequence[Configuration]) -> partial[None]:
        return partial(run_configurations, configurations=rows)

    return [
        Part("doctor", "what the doctor finds", 10, look_at_machine),
        Part("launcher", "trials are forked from one process", 40, start_launcher),
        Part("visible", "CUDA_VISIBLE_DEVICES in every form", 15, check_visible, (CUDA,)),
        Part("precision", "fp32, tf32, bf16, fp16, pure bf16", 24, trials(table.PRECISION)),
        Part("attention", "eager, sdpa's flash kernel, flash, flex", 24, trials(table.ATTENTION)),
        Part("checkpointing", "every kind", 16, trials(table.CHECKPOINTING)),
        Part("savers", "the loss in chunks, expandable segments, an emptied cache", 32, trials(table.SAVERS)),
        Part("adapters", "LoRA, QLoRA, int8", 16, trials(table.ADAPTERS)),
        Part("optimizers", "of torch, Adafactor, 8-bit, paged", 14, trials(table.OPTIMIZERS)),
        Part("vision", "images by data-loader workers", 10, trials(table.VISION)),
        Part("overflow", "fp16 that always overflows must not complete", 16, trials(table.OVERFLOW), (CUDA,)),
        Part("liger", "Liger kernels", 24, trials(table.LIGER), (CUDA,)),
        Part("compile", "inductor, max-autotune", 130, trials(table.COMPILATION), (CUDA,)),
        Part("estimates", "estimates beside what trials measure", 20, check_estimates, (DATA_SHEET,)),
        Part("tf32", "TF32 from the environment, and by a script", 32, preset_tf32, (CUDA, TF32)),
        Part("sharing", "another process holds most of the memory", 18, share_device, (CUDA,)),
        Part("losses", "losses beside the reference's, as --check-loss holds them", 20, check_losses),
        *parts_of(models),
        Part("export", "exported against measured throughput", 55, train_exported),
    ]


def main() -> int:
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
    standin = ground_of(hardware) is Ground.STAND_IN
    named = hardware.model_copy(update={"name": "stand-in, no GPU"}) if standin else hardware
    report = Report(options.out or results_path("pack", named), hardware)
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
        report.check(*check)
    report.check("all parts were run", ended == "at its end", f"{ended} after {report.elapsed_s():.0f} s")
    report.finish()
    return 130 if ended == "interrupted" else 0 if report.passed else 1


def run(chosen: Sequence[Part], session: Session, deadline_s: float) -> None:
    """Go through the parts, each in the time that is its own or left over."""
    scale, report = deadline_s / DEADLINE_S, session.report
    possible = []
    for part in chosen:
        lacking = next((need.name for need in part.needs if not need.is_there(session.hardware)), None)
        if lacking is None:
            possible.append(part)
            continue
        session.begin(part.name, 0.0)
        report.note(passed_over=f"needs {lacking}")
        print(f"{part.name}: passed over, it needs {lacking}", flush=True)
    before = session.watch.used_bytes()
    for number, part in enumerate(possible):
        promised = sum(later.seconds for later in possible[number + 1 :]) * scale
        run_part(part, session, deadline_s - report.elapsed_s() - promised, part.seconds * scale)
    session.end_runner()
    report.begin("all")
    left = session.watch.used_bytes() - before
    report.check("the device's memory is back", left < TOLERANCE_BYTES, f"{left / 2**20:+.0f} MiB")


def run_part(part: Part, session: Session, seconds: float, usual_s: float) -> None:
    """Run one part, which should take `usual_s` and is ended after `seconds`; whatever goes wrong is a failed check."""
    print(f"{part.name}: {part.shows}, at most {seconds:.0f} s", flush=True)
    began, check = time.monotonic(), session.report.check
    session.begin(part.name, min(seconds, usual_s))
    try:
        if seconds < LEAST_S:
            raise OutOfTime
        with alarm(seconds):
            part.run(session)
    except OutOfTime:
        check(f"{part.name}: ends in its time", False, f"no time left after {seconds:.0f} s")
    except Exception as error:
        traceback.print_exc()
        check(part.name, False, f"{type(error).__name__}: {error}")
    session.report.note(duration_s=round(time.monotonic() - began, 1))


def parse_options() -> argparse.Namespace:
    words = partial(str.split, sep=",")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: %(default)s)")
    parser.add_argument(
        "--models",
        type=words,
        default=["t5-small", "bert-large-uncased", "t5-3b"],
        help=f"to search for, of {', '.join(SEARCHES)}, with commas between (default: all but tiny)",
    )
    parser.add_argument("--parts", type=words, help="these alone, with commas between (default: all)")
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


if __name__ == "__main__":
    sys.exit(main())
