"""Trains the winner of a search again and again as a plain script, and counts how often it is as fast as stated.

    python benchmarks/repeat.py runs/llama-3m-.../best-config.json
    python benchmarks/repeat.py --model benchmarks/tables/models/llama-3m --seq-len 32

Each run is a fresh process of `examples/train_with_result.py`, without autotune around it. The answer states an
interval in which the next run falls in 95 of 100 cases: of 20 runs, at least 19 are to. The ratio of their mean to the
stated rate tells a bias. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from export_throughput import parsed, parser_of, search, steps_for, train
from provenance import provenance, results_path

import autotune
from autotune.tuning_result import TuningResult
from autotune.value import write_text
from autotune.values.hardware import detect
from autotune.values.trial import Interval

ASKED_SHARE = 19 / 20


def main() -> None:
    """Measure, print and write what the command line asks for."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["AUTOTUNE_HOME"] = str(Path(scratch) / "home")
        path = options.config or search(options, Path(scratch))
        result = autotune.load(path)
        hardware = detect("cpu" if result.hardware.is_cpu else result.hardware.device)
        rates = []
        for number in range(options.runs):
            rates.append(train(path, hardware, Path(scratch) / f"out-{number}", steps_for(result, options.seconds)))
            print(f"run {number}: {rates[-1]:.2f} samples/s", file=sys.stderr, flush=True)
    document = {**provenance(hardware), "load_average": os.getloadavg(), **summary(result, rates)}
    output = options.out or results_path(f"repeat-{result.workload.model.name}", hardware).with_suffix(".json")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(json.dumps(document, indent=2) + "\n", output)
    print(json.dumps(document))


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
        "stated_interval": finite(stated),
        "rates": rates,
        "inside": inside,
        "runs": len(rates),
        "met": inside >= ASKED_SHARE * len(rates),
        "ratio": math.exp(statistics.fmean(logarithms)),
        "spread": statistics.stdev(logarithms) if len(logarithms) > 1 else None,
        "disturbances": result.disturbances,
    }


def finite(interval: Interval) -> list[float | None]:
    """Return an interval as JSON knows it: None is no bound."""
    return [bound if math.isfinite(bound) else None for bound in (interval.low, interval.high)]


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=8, help="of training in each run (default: %(default)s)")
    return parsed(parser)


if __name__ == "__main__":
    main()
