"""Compares what an exported configuration really does with what autotune measured of it.

    python benchmarks/export_throughput.py runs/t5-small-.../best-config.json

In each round the configuration is measured twice, in an order that alternates: as a trial of autotune, and by
`examples/train_with_result.py` in a fresh process, or in those of torchrun, a plain Trainer without autotune around it.
A ratio of 1 means that the exported arguments train exactly as fast as was promised. The answer states an interval in
which the next run falls in 95 of 100 cases: it is counted how many of the exported ones do (`--rounds 20` tells more).
The last line is the result as JSON; it is also written to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from pack.trials import request_of
from provenance import ROOT, keep

import autotune
from autotune.execution.environment import launcher_environment
from autotune.execution.runner import LocalRunner
from autotune.tuning_result import TuningResult
from autotune.values.hardware import Hardware, detect, like_devices
from autotune.values.statistics import half_width
from autotune.values.trial import DescribeRequest, Purpose

EXAMPLE = ROOT / "examples" / "train_with_result.py"
TIMEOUT_S = 900.0
FEWEST_STEPS, MOST_STEPS = 3, 200


class Round(NamedTuple):
    """Samples per second of one configuration, both ways."""

    exported: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.exported / self.measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="the best-config.json of a search")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20, help="of each side in each round (default: %(default)s)")
    options = parser.parse_args()
    result = autotune.load(options.config)
    hardware = detect("cpu" if result.hardware.is_cpu else result.hardware.device)
    found = summary(result, compare(options.config, hardware, count=options.rounds, seconds=options.seconds))
    keep(f"export-{result.workload.model.name}", hardware, found)


def compare(path: Path, hardware: Hardware, *, count: int, seconds: float) -> list[Round]:
    """Return `count` rounds, each side running for about `seconds`, in an order that alternates.

    Raises:
        RuntimeError: One of the two can't train what the search has trained.
    """
    result, rounds = autotune.load(path), list[Round]()
    measured = result.best.measurement
    step_s = statistics.fmean(measured.step_times_s) if measured else 1.0
    steps = min(MOST_STEPS, max(FEWEST_STEPS, round(seconds / step_s)))
    with tempfile.TemporaryDirectory() as scratch, LocalRunner(Path(scratch), hardware) as runner:
        if result.workload.dataset is not None:
            runner.describe(DescribeRequest(workload=result.workload))  # tokenizes
        for number in range(count):
            sides = {
                "measured": lambda n=number: trial(result, hardware, runner, n, steps),
                "exported": lambda: train(path, hardware, Path(scratch) / "out", steps),
            }
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            rounds.append(Round(**{name: sides[name]() for name in order}))
            print(f"round {number}: {rounds[-1]}, ratio {rounds[-1].ratio:.3f}", file=sys.stderr, flush=True)
    return rounds


def trial(result: TuningResult, hardware: Hardware, runner: LocalRunner, number: int, steps: int) -> float:
    """Return the throughput that autotune measures, over `steps` steps after the first."""
    config = result.best.config
    fields = {"purpose": Purpose.FINAL, "accumulation_steps": result.workload.accumulation_steps(config)}
    limits = {"discarded_steps": 1, "measure_steps": steps, **dict.fromkeys(("timeout_s", "measure_time_s"), TIMEOUT_S)}
    limits |= {"memory_bytes": result.memory_bytes, "relative_interval": 1e-9}  # never tight enough to end early
    outcome = runner.run(request_of(number, config, result.workload, hardware, fields, **limits))
    if outcome.measurement is None:
        raise RuntimeError(f"the trial ended as {outcome.status}: {getattr(outcome.outcome, 'cause', '')}")
    return outcome.measurement.samples_per_second


def train(path: Path, hardware: Hardware, output: Path, steps: int) -> float:
    """Return the throughput of the exported configuration as its own command launches it, over `steps` after the first.

    Of several devices it is torchrun that starts a process for each.
    """
    result = autotune.load(path)
    ranks = result.best.config.parallelism.world_size
    others = like_devices(hardware.device)[1:ranks] if ranks > 1 and not hardware.is_cpu else ()
    visible = launcher_environment(hardware.device, {}, others=others)["CUDA_VISIBLE_DEVICES"]  # no others are seen
    script = [str(EXAMPLE), str(path), "--steps", str(steps + 1), "--output-dir", str(output)]
    command, told = launched(result.launch_commands[0], script)
    own = {**told, "CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **own})
    if done.returncode != 0:
        raise RuntimeError(f"{EXAMPLE.name} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    printed = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    return float(json.loads(printed[-1])["samples_per_second"])


def launched(line: str, script: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command of a line such as 'OMP_NUM_THREADS=4 torchrun ... train.py', with its environment.

    The script takes the place of `train.py`, and programs are those beside this interpreter.
    """
    words = shlex.split(line)
    told = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    program, *options = words[len(told) : -1]
    start = [sys.executable] if program == "python" else [str(Path(sys.executable).with_name(program))]
    return [*start, *options, *script], told


def summary(result: TuningResult, rounds: list[Round]) -> dict[str, Any]:
    """Return the ratio with its 95 % interval, and what it is made of."""
    logarithms = [math.log(r.ratio) for r in rounds]
    centre, half = statistics.fmean(logarithms), half_width(logarithms)
    found: dict[str, Any] = {
        "model": result.workload.model.name,
        "config": result.best.config.model_dump(mode="json"),
        "ratio": math.exp(centre),
        "ratio_interval": [math.exp(centre - half), math.exp(centre + half)] if math.isfinite(half) else None,
        "rounds": [r._asdict() for r in rounds],
    }
    if (searched := result.best.measurement) is not None:
        stated = searched.samples_per_second_interval
        found["ratio_to_the_search"] = statistics.fmean(r.exported for r in rounds) / searched.samples_per_second
        found["inside_the_stated_interval"] = sum(stated.low <= r.exported <= stated.high for r in rounds)
    return found


if __name__ == "__main__":
    main()
