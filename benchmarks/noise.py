"""Counts what planted noise does to the answer of a search: the same winner, an honest "no clear winner", a wrong one.

    python benchmarks/noise.py --model benchmarks/tables/models/llama-3m --runs 3

First some searches run undisturbed. Then as many run while other processes load every core for half of the trials: the
first half in even runs, the second, with the finals, in odd ones. A disturbed answer is

    same     the configuration that an undisturbed search chose
    alike    another, but an undisturbed search measured it within 5 % of its winner
    honest   "no_clear_winner", "undecided" or "unconfirmed": the noise is admitted
    wrong    another configuration, called faster

and it is told whether the answer mentions the noise. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from measured_searches import find, parser_of, told, trials_of
from provenance import keep

from autotune.tuning_result import TuningResult
from autotune.values.config import TrainConfig
from autotune.values.hardware import detect
from autotune.values.problem import Event, TrialStarted

ALIKE = 0.95


def burn() -> None:
    """Load a core until killed."""
    while True:
        sum(range(100_000))


class Noise:
    """Loads every core that this process may use while trials of the given numbers run; listens to a search."""

    def __init__(self, disturbed: Iterable[int]) -> None:
        self._disturbed = frozenset(disturbed)
        self._burners: list[multiprocessing.Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def __call__(self, event: Event) -> None:
        """Start or stop with a trial."""
        if not isinstance(event, TrialStarted):
            return
        if event.number not in self._disturbed:
            self._stop()
        elif not self._burners:
            self._burners = [multiprocessing.Process(target=burn, daemon=True) for _ in os.sched_getaffinity(0)]
            for burner in self._burners:
                burner.start()

    def _stop(self) -> None:
        for burner in self._burners:
            burner.kill()
            burner.join()
        self._burners = []


def classify(disturbed: TuningResult, quiet: list[TuningResult]) -> str:
    """Return what became of the answer."""
    if any(disturbed.best.config == result.best.config for result in quiet):
        return "same"
    if any(rate_beside_winner(result, disturbed.best.config) >= ALIKE for result in quiet):
        return "alike"
    return "wrong" if disturbed.verdict in ("faster", "baseline_failed") else "honest"


def rate_beside_winner(result: TuningResult, config: TrainConfig) -> float:
    """Return the throughput that a search measured of `config` over that of its winner, 0 if it measured none."""
    rates = [t.samples_per_second for t in result.trials if t.config == config and t.samples_per_second]
    winner = result.best.measurement
    return max(rates, default=0.0) / winner.samples_per_second if winner else 0.0


def search(options: argparse.Namespace, disturbed: Iterable[int]) -> TuningResult:
    """Return the answer of one search, disturbed while the trials of these numbers run."""
    with tempfile.TemporaryDirectory() as scratch, Noise(disturbed) as noise:
        return find(options, Path(scratch), observer=noise)


def main() -> None:
    """Measure, print and write what the command line asks for."""
    parser = parser_of(__doc__, usual={"model": "benchmarks/tables/models/llama-3m", "device": "cpu"})
    parser.add_argument("--runs", type=int, default=3, help="disturbed searches (default: %(default)s)")
    parser.add_argument("--undisturbed", type=int, help="searches before them (default: as many)")
    options = parser.parse_args()
    hardware = detect(options.device)
    quiet: list[TuningResult] = []
    for number in range(options.undisturbed or options.runs):
        quiet.append(search(options, ()))
        print(f"undisturbed {number}: {told(quiet[-1])}", file=sys.stderr, flush=True)
    half = max(map(trials_of, quiet)) // 2
    disturbed: list[dict[str, Any]] = []
    for number in range(options.runs):
        result = search(options, range(half) if number % 2 == 0 else range(half, 10_000))
        disturbed.append({"outcome": classify(result, quiet), "first_half": number % 2 == 0, **told(result)})
        print(f"disturbed {number}: {disturbed[-1]}", file=sys.stderr, flush=True)
    found = {
        "model": options.model,
        "counts": dict(Counter(d["outcome"] for d in disturbed)),
        "told_of_noise": sum(bool(d["disturbances"]) for d in disturbed),
        "undisturbed": [told(r) for r in quiet],
        "disturbed": disturbed,
    }
    keep(f"noise-{Path(options.model).name}", hardware, found, options.out)


if __name__ == "__main__":
    main()
