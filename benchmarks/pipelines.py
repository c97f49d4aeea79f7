"""Holds a search over the schedule and the micro-batches of a pipeline against all of its configurations.

    python benchmarks/pipelines.py [--effort quick] [--micro-batch 32] [--rounds 3]

Runs the search of `examples/pipeline_loop.py` on two processes of the CPU, from a baseline of one micro-batch, which
leaves each of them idle half the time. Then every configuration of its space is measured, one after another, in rounds,
so that a machine whose speed drifts slows all of them. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from provenance import ROOT, keep

import autotune
from autotune.execution.runner import LocalRunner
from autotune.storage.run_directory import read_plan
from autotune.values.trial import Purpose

sys.path.insert(0, str(ROOT / "examples"))
from pipeline_loop import GLOBAL_BATCH, knobs, pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--micro-batch", type=int, default=GLOBAL_BATCH, help="of the baseline (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of measuring all configurations (default: %(default)s)")
    parser.add_argument("--effort", default="quick", help="of the search (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        baseline, run, every = Path(scratch, "baseline.json"), Path(scratch, "run"), Path(scratch, "every")
        baseline.write_text(json.dumps({"per_device_train_batch_size": options.micro_batch}))
        asked = {"device": "cpu", "devices": 2, "effort": options.effort, "baseline": baseline}
        result = autotune.find(step=pipeline(128), knobs=knobs(2), run_dir=run, **asked)
        plan = read_plan(run)
        shutil.copytree(run / "data", every / "data")
        rates: dict[str, list[float]] = {}
        with LocalRunner(every, plan.hardware) as runner:
            for number in range(options.rounds):
                for at, config in enumerate(configs := plan.every_config()):
                    request = plan.request_of(config, Purpose.SEARCH, number=number * len(configs) + at, timeout_s=300)
                    if (measured := runner.run(request).measurement) is not None:
                        rates.setdefault(shown(config), []).append(measured.samples_per_second)
    means = {name: statistics.fmean(each) for name, each in rates.items()}
    best, answer, before = max(means, key=means.__getitem__), shown(result.best.config), shown(plan.baseline)
    found = {
        "verdict": result.verdict,
        "answer": answer,
        "speedup": result.speedup.model_dump() if result.speedup else None,
        "trials": sum(trial.number is not None for trial in result.trials),
        "search_time_s": result.search_time_s,
        "best_of_all": best,
        "answer_over_best": means[answer] / means[best],
        "baseline_over_best": means[before] / means[best],
        "samples_per_second": rates,
    }
    keep(f"pipelines-{options.effort}", result.hardware, found)


def shown(config: autotune.TrainConfig) -> str:
    return f"{config.own.model_dump()['schedule']} {config.per_device_train_batch_size}"


if __name__ == "__main__":
    main()
