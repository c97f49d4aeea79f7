"""Trains the winner of a search again and again as a plain script, and counts how often it is as fast as stated.

    python benchmarks/repeat.py runs/llama-3m-.../best-config.json
    python benchmarks/repeat.py --model benchmarks/tables/models/llama-3m --seq-len 32

Each run is a fresh process of `examples/train_with_result.py`, without autotune around it. The answer states an
interval in which the next run falls in 95 of 100 cases: of 20 runs, at least 19 are to. The ratio of their mean to the
stated rate tells a bias. The last line is the result as JSON.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from export_throughput import answer_of, parser_of_answer, steps_for, train
from provenance import keep

import autotune
from autotune.tuning_result import TuningResult
from autotune.values.hardware import detect

ASKED_SHARE = 19 / 20


def main() -> None:
    """Measure, print and write what the command line asks for."""
    parser = parser_of_answer(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=8, help="of training in each run (default: %(default)s)")
    options = parser.parse_args()
    rates: list[float] = []
    with answer_of(parser, options) as path, tempfile.TemporaryDirectory() as scratch:
        os.environ["AUTOTUNE_HOME"] = str(Path(scratch) / "home")
        result = autotune.load(path)
        hardware = detect("cpu" if result.hardware.is_cpu else result.hardware.device)
        for number in range(options.runs):
            rates.append(train(path, hardware, Path(scratch) / f"out-{number}", steps_for(result, options.seconds)))
            print(f"run {number}: {rates[-1]:.2f} samples/s", file=sys.stderr, flush=True)
    keep(f"repeat-{result.workload.model.name}", hardware, summary(result, rates), options.out)


def summary(result: TuningResult, rates: list[float]) -> dict[str, Any]:
    """Return how many rates lie in the stated interval, and how far their mean is from the stated one.

    Raises:
        RuntimeError: The answer states no throughput.
    """
    measured = result.best.measurement
    if measured is None:
        raise RuntimeError("the best configuration of this result was never measured")
    stated = measured.samples_per_second_interval
    inside = sum(stated.low <= rate <= stated.high for rate in rates)
    logarithms = [math.log(rate / measured.samples_per_second) for rate in rates]
    return {
        "model": result.workload.model.name,
        "config": result.best.config.model_dump(mode="json"),
        "confirmed": result.best.confirmed,
        "stated": measured.samples_per_second,
        "stated_interval": [b if math.isfinite(b) else None for b in (stated.low, stated.high)],
        "rates": rates,
        "inside": inside,
        "runs": len(rates),
        "met": inside >= ASKED_SHARE * len(rates),
        "ratio": math.exp(statistics.fmean(logarithms)),
        "spread": statistics.stdev(logarithms) if len(logarithms) > 1 else None,
        "disturbances": result.disturbances,
    }


if __name__ == "__main__":
    main()
