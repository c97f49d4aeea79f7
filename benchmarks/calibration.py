"""Holds the chance to fit against published runs that ran or ran out of memory on one device.

The chance is that of `estimates/report.py`: what is needed is the allocated peak, what is beyond the allocator and a
share of the allocator's unused memory, and is unsure by the context and a part of itself. Share and part are chosen by
the likelihood of the runs of all sources but one, and the runs of that one are judged by them. Reads the predictions
that `predictor.py` has saved; nothing is traced. Run it from the repository's root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from predictor import ROWS
from provenance import provenance, results_path
from published.rows import load_rows
from published.setups import setup_of

from autotune.cost.memory import _CUDA
from autotune.values.hardware import detect

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
PARTS = (0.01, 0.02, 0.03, 0.05, 0.08)
BINS = (0.0, 0.05, 0.5, 0.95, 1.0)


class Run(NamedTuple):
    """A published run on one device; bytes."""

    source: str
    capacity: float
    allocated: float
    reserved: float
    ran: bool


def runs_of(results: Path) -> list[Run]:
    """Return the runs of one device that were predicted."""
    rows = {row.id: row for row in load_rows(ROWS)}
    predictions = json.loads(results.read_text(encoding="utf-8"))["predictions"]
    return [
        Run(
            rows[p["id"]].group,
            setup_of(rows[p["id"]]).gpu.memory_bytes,
            1e9 * p["allocated_gb"],
            1e9 * (p["reserved_gb"] - p.get("spare_gb", 0.0)),
            p["ran"],
        )
        for p in predictions
        if p["devices"] == 1
    ]


def chance(run: Run, share: float, part: float) -> float:
    """Return the chance that a run fits."""
    context, deviation = _CUDA
    needed = run.allocated + context + share * (run.reserved - run.allocated)
    return 0.5 * math.erfc((needed - run.capacity) / math.hypot(deviation, part * needed) / math.sqrt(2))


def likelihood(runs: Sequence[Run], share: float, part: float) -> float:
    """Return the logarithm of the likelihood of what happened; no chance is taken for nearer to 0 or 1 than 1e-4."""
    chances = [min(max(chance(run, share, part), 1e-4), 1 - 1e-4) for run in runs]
    return sum(math.log(c if run.ran else 1 - c) for run, c in zip(runs, chances, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the calibration curve; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("results", type=Path, help="predictions saved by predictor.py")
    parser.add_argument("--out", type=Path, help="JSON file for the curve (default: under benchmarks/results)")
    options = parser.parse_args(arguments)
    runs = runs_of(options.results)
    judged: list[tuple[float, bool]] = []
    for source in sorted({run.source for run in runs}):
        others = [run for run in runs if run.source != source]
        share, part = max(itertools.product(SHARES, PARTS), key=lambda pair: likelihood(others, *pair))
        own = [run for run in runs if run.source == source]
        judged += [(chance(run, share, part), run.ran) for run in own]
        print(f"{source:24} {len(own):4} runs, by the others: {share:.0%} of what is unused, unsure by {part:.0%}")
    curve = []
    for low, high in itertools.pairwise(BINS):
        inside = [(c, ran) for c, ran in judged if low <= c < high or c == high == 1.0]
        if inside:
            said, ran = (sum(pair[i] for pair in inside) / len(inside) for i in (0, 1))
            curve.append({"from": low, "to": high, "runs": len(inside), "said": round(said, 3), "ran": round(ran, 3)})
            print(f"said {low:4.0%} to {high:4.0%}: {len(inside):4} runs, {said:6.1%} said on average, {ran:6.1%} ran")
    right = sum((c > 0.5) == ran for c, ran in judged)
    best = max(itertools.product(SHARES, PARTS), key=lambda pair: likelihood(runs, *pair))
    figures = {"runs": len(judged), "right": right, "curve": curve, "all_sources": best}
    hardware = detect("cpu")
    path = options.out or results_path("calibration", hardware).with_suffix(".json")
    path.write_text(json.dumps({**provenance(hardware), "figures": figures}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
