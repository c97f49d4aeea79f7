"""Trains one configuration in two processes in turn, again and again, and tells how far their ratio is from 1.

    python benchmarks/alike.py --model t5-small --pairs 12

Whatever two processes of the same training keep apart for their lives is `PROCESS_SPREAD` in `values/statistics.py`.
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import provenance, results_path

from autotune.execution.runner import LocalRunner
from autotune.training.heads import default_task
from autotune.training.resolve import resolve
from autotune.value import write_text
from autotune.values.config import TrainConfig
from autotune.values.hardware import Hardware, default_budget_bytes, detect
from autotune.values.statistics import paired_ratio
from autotune.values.trial import Limits, Purpose, TrialRequest, TrialResult
from autotune.values.workload import Workload


def pair(number: int, workload: Workload, hardware: Hardware, runner: LocalRunner, seconds: float) -> dict[str, Any]:
    """Return what two processes in turn measured of the same training; each measures for so many seconds."""
    config = TrainConfig(per_device_train_batch_size=8, dataloader_pin_memory=False)
    numbers = (2 * number, 2 * number + 1)
    limits = Limits(
        memory_bytes=default_budget_bytes(hardware),
        timeout_s=1000.0,
        discarded_steps=1,
        measure_steps=4000,
        measure_time_s=seconds,
        relative_interval=1e-9,  # never tight enough to end early
    )
    requests = [
        TrialRequest(
            number=n,
            purpose=Purpose.FINAL,
            config=config,
            workload=workload,
            device=hardware.device,
            accumulation_steps=workload.accumulation_steps(config),
            limits=limits,
            in_turn_with=numbers,
        )
        for n in numbers
    ]
    first, second = map(turns_of, runner.run_in_turn(requests))
    ratio, interval = paired_ratio([list(zip(first, second, strict=False))])
    logs = [math.log(a / b) for a, b in zip(first, second, strict=False)]
    return {
        "ratio": ratio,
        "low": interval.low,
        "high": interval.high,
        "holds": interval.low <= 1.0 <= interval.high,
        "turns": len(logs),
        "standard_error": statistics.stdev(logs) / math.sqrt(len(logs)),
    }


def turns_of(result: TrialResult) -> list[float]:
    """Return the mean seconds of a step of each turn."""
    measured = result.measurement
    if measured is None or measured.steps_per_turn is None:
        raise RuntimeError(f"trial {result.request.number} did not run in turn: {result.status}")
    times, size = measured.step_times_s, measured.steps_per_turn
    return [statistics.fmean(times[at : at + size]) for at in range(0, len(times), size)]


def main() -> None:
    """Measure the pairs, print and write what they gave."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="t5-small", help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=12.0, help="each process measures (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    options = parser.parse_args()
    hardware, spec = detect(options.device), resolve(options.model)
    task = default_task(spec)
    workload = Workload(model=spec, task=task, sequence_length=64, target_length=64, global_batch_size=8)
    found = []
    with tempfile.TemporaryDirectory() as scratch, LocalRunner(Path(scratch), hardware) as runner:
        for number in range(options.pairs):
            found.append(pair(number, workload, hardware, runner, options.seconds))
            print(f"{number}: {found[-1]}", file=sys.stderr, flush=True)
    logs = [math.log(f["ratio"]) for f in found]
    document = {
        **provenance(hardware),
        "model": options.model,
        "spread": statistics.pstdev(logs, mu=0.0),
        "expected_of_turns": math.sqrt(statistics.fmean(f["standard_error"] ** 2 for f in found)),
        "held": sum(f["holds"] for f in found),
        "pairs": found,
    }
    output = results_path(f"alike-{Path(options.model).name}", hardware).with_suffix(".json")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(json.dumps(document, indent=2) + "\n", output)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
