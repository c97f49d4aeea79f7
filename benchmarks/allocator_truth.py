"""Predicted memory against torch's real caching allocator, on stand-in devices: full-size models as real trials.

    python benchmarks/allocator_truth.py measure [--part PART]
    python benchmarks/allocator_truth.py predict [--part PART] [--predicted FILE]
    python benchmarks/allocator_truth.py report [--part PART] [--predicted FILE] [--rows]

`measure` needs torch's CUDA build on the stand-in for the driver, where a trial of a model with seven billion weights
takes seconds: allocator, kernels' choice, workspaces and optimizers are the real ones, computed values are zero. It
runs the plan's configurations as trials, each through autotune's runner and worker, and appends a row for each to a
file of JSON lines as it ends, so a run that was stopped goes on. `predict` traces the same configurations, on any
machine; compiled ones on the stand-in, as their programs need torch's CUDA build. `report` sets the two side by side.

The configurations: `allocator_plan.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from allocator_plan import DEVICES, PARTS, SEED, Case, plan, workload_of
from provenance import RESULTS, error_figures, provenance

from autotune.values.workload import Workload

# More than any of these cards has: what is looked for is the peak of all configurations, and not which of them fit.
MEMORY = "200GiB"

# What the stand-in takes for a context: an arbitrary size.
STAND_IN_CONTEXT = 450 << 20

_ENTRY = "allocator_truth:trial"


# Measuring


def trial(directory: Path) -> None:
    """Run a trial in this process and end it as programs do, so that the stand-in writes down its kernels."""
    from autotune.execution.launch import run_trial

    run_trial(directory)
    sys.stdout.flush()
    sys.stderr.flush()
    if "FAKECUDA_KERNELS" in os.environ and "AUTOTUNE_TRUTH_EXIT" in os.environ:
        ctypes.CDLL(None).exit(0)


def measure(parts: Iterable[str], out: Path) -> None:
    """Run what isn't in `out` yet, in a process for each kind of device: the stand-in is one for life."""
    for capability, (multiprocessors, name) in DEVICES.items():
        environment = {
            **os.environ,
            "FAKECUDA_CC": capability,
            "FAKECUDA_SMS": str(multiprocessors),
            "FAKECUDA_NAME": name,
            "FAKECUDA_MEMORY": MEMORY,
            "FAKECUDA_DEVICES": "4",
            "FAKECUDA_CONTEXT": f"{STAND_IN_CONTEXT >> 20}MiB",
            "AUTOTUNE_TRUTH_EXIT": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, __file__, "measure", "--capability", capability, "--measured", str(out)]
        for part in parts:
            subprocess.run([*command, "--part", part], env=environment, check=True)


def _measure_here(capability: str, parts: Iterable[str], out: Path) -> None:
    from autotune.execution.runner import LocalRunner
    from autotune.space.rules import refusals
    from autotune.values.hardware import detect

    hardware = detect("cuda:0")
    known = {row["key"] for row in read(out)}
    wanted = [c for c in plan() if c.capability == capability and c.part in parts and c.key not in known]
    if not wanted:
        return
    append(out, {"run": provenance(hardware), "capability": capability, "stand_in_memory": MEMORY})
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FAKECUDA_KERNELS"] = str(Path(scratch) / "kernels")
        for several in (False, True):
            chosen = [c for c in wanted if (c.config.parallelism.world_size > 1) == several]
            with LocalRunner(Path(scratch), hardware, entry=_ENTRY) as runner:
                for case in chosen:
                    workload, facts = workload_of(case)
                    reason = next(refusals(case.config, workload, facts, hardware), None)
                    row = {"refused": reason} if reason else _run(case, workload, hardware, runner, Path(scratch))
                    append(out, {"key": case.key, "case": case.model_dump(mode="json", exclude_unset=True), **row})


def _run(case: Case, workload: Workload, hardware: Any, runner: Any, scratch: Path) -> dict[str, Any]:
    from pack.trials import request_of

    from autotune.values.budget import SoakTask

    started = time.monotonic()
    soak = SoakTask(eval_batch_sizes=(case.config.per_device_train_batch_size,)) if case.soak else None
    limits = {"timeout_s": 900 if case.part == "compiled" else 240, "memory_bytes": 190 << 30, "measure_time_s": 100}
    limits |= {"discarded_steps": 1, "discarded_s": 0, "measure_steps": 2, "relative_interval": 1e-9}
    fields = {"accumulation_steps": case.accumulation, "task": soak}
    result = runner.run(request_of(case.number, case.config, workload, hardware, fields, **limits))
    row: dict[str, Any] = {"status": str(result.status), "seconds": round(time.monotonic() - started, 1)}
    kernels = _kernels(scratch)  # of a trial that failed as well, lest they be taken for the next one's
    if result.measurement is None:
        return {**row, "cause": result.outcome.cause}
    return {
        **row,
        "memory": result.measurement.memory.model_dump(mode="json", exclude_none=True),
        "attention": _attention(kernels) if kernels else None,
    }


def _kernels(scratch: Path) -> list[str]:
    """Return the names of the kernels that the processes since the last call have launched."""
    found: set[str] = set()
    for path in scratch.glob("kernels.*"):
        found.update(line.partition("\t")[2] for line in path.read_text().splitlines())
        path.unlink()
    return sorted(found)


def _attention(kernels: Iterable[str]) -> list[str]:
    """Return which kernels of attention are among those launched.

    Neither of the fused ones and a softmax that is no logarithm, as that of a loss is: torch's math attention.
    """
    softmax = "(?<!Log)SoftMaxForward|softmax_warp_forward"
    marks = {"flash": "flash_fwd", "efficient": "fmha_cutlassF", "softmax": softmax}
    return [name for name, mark in marks.items() if any(re.search(mark, kernel) for kernel in kernels)]


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row, sort_keys=True) + "\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that are of a case; those of its runs are left out."""
    if path.exists():
        yield from (row for line in path.read_text().splitlines() if "key" in (row := json.loads(line)))


# Predicting


def hardware_of(capability: str, measured: Path) -> Any:
    """Return the stand-in that a file's cases were measured on."""
    from autotune.values.hardware import Hardware

    for line in measured.read_text().splitlines():
        row = json.loads(line)
        if "run" in row and row["capability"] == capability:
            return Hardware.model_validate(row["run"]["hardware"])
    raise SystemExit(f"{measured}: nothing was measured on compute capability {capability}")


def predict(parts: Iterable[str], measured: Path, out: Path, families: Iterable[str] = ()) -> None:
    """Predict each measured case with the cost model as it is, nothing learned, and append a row for each."""
    from autotune.values.hardware import detect

    chosen = set(families)
    append(out, {"run": provenance(detect("cpu"))})
    rows = [row for row in read(measured) if "memory" in row]
    random.Random(SEED).shuffle(rows)  # so that those of a run that is stopped are a sample of all
    known = {row["key"] for row in read(out)}
    for row in rows:
        case = Case.model_validate(row["case"])
        if case.part not in parts or row["key"] in known or (chosen and case.family not in chosen):
            continue
        append(out, {"key": row["key"], **_predicted(case, hardware_of(case.capability, measured))})


def _predicted(case: Case, hardware: Any) -> dict[str, Any]:
    from autotune.cost.family import family_of, shape_of
    from autotune.cost.model import CostModel
    from autotune.cost.profiler import profile
    from autotune.cost.rates import rates_by_table
    from autotune.errors import InputError

    started = time.monotonic()
    workload, facts = workload_of(case)
    family, known = family_of(case.config, hardware), {"parameters": facts.parameters}
    try:
        found = profile(workload.model, family, shape_of(workload), **known)
    except InputError:  # as a search falls back on the rule of thumb
        found = profile(workload.model, family.as_written, shape_of(workload), **known)
    model = CostModel.of(workload, hardware, rates_by_table(hardware), [found])
    memory = model.breakdown(case.config, found)
    return {
        "memory": memory.model_dump(mode="json"),
        **({"programs": found.family.compiled, "unlike": found.unlike} if case.part == "compiled" else {}),
        "seconds": round(time.monotonic() - started, 1),
    }


# Reporting

QUANTITIES = {"allocated": "allocated_peak_bytes", "reserved": "reserved_peak_bytes", "device": "device_peak_bytes"}


def compared(parts: Iterable[str], measured: Path, predicted: Path) -> list[dict[str, Any]]:
    """Return the cases that were both measured and predicted, with predicted over measured less one."""
    from autotune.cost.memory import _CUDA

    predictions = {row["key"]: row for row in read(predicted)}
    rows = []
    for row in read(measured):
        if "memory" not in row or row["key"] not in predictions or row["case"]["part"] not in parts:
            continue
        guess = predictions[row["key"]]
        expected = {name: guess["memory"][field] for name, field in QUANTITIES.items()}
        expected["device"] += STAND_IN_CONTEXT - _CUDA[0]  # the stand-in's context for the predicted one
        errors = {name: expected[name] / row["memory"][f"{name}_bytes"] - 1 for name in QUANTITIES}
        interval = guess["memory"]["reserved_interval"]
        covered = interval["low"] <= row["memory"]["reserved_bytes"] <= interval["high"]
        rows.append({**row, "predicted": guess, "errors": errors, "reserved_covered": covered})
    return rows


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors over rows: signed median, median, 90th percentile and the worst, in percent."""
    summary: dict[str, Any] = {"rows": len(rows)}
    for name in QUANTITIES:
        if rows:
            summary[name] = error_figures([100 * row["errors"][name] for row in rows], 2)
    return summary


def report(parts: Iterable[str], measured: Path, predicted: Path, *, each: bool) -> None:
    """Print the figures by half of the families, one device and several apart; `each`: a line a configuration too."""
    for part in parts:
        rows = compared([part], measured, predicted)
        groups = {
            "one device": [r for r in rows if not _several(r) and not r["case"].get("soak")],
            "with evaluation and saving": [r for r in rows if r["case"].get("soak")],
            "two devices": [r for r in rows if _several(r)],
        }
        for name, group in groups.items():
            if each:
                for row in sorted(group, key=lambda r: -abs(r["errors"]["allocated"])):
                    print(_line(row))
            print(json.dumps({"part": part, "group": name, **figures(group)}))


def _several(row: dict[str, Any]) -> bool:
    return bool(row["case"]["config"].get("parallelism", {}).get("world_size", 1) > 1)


def _line(row: dict[str, Any]) -> str:
    case, config, memory = row["case"], dict(row["case"]["config"]), row["memory"]
    adapter, size = config.pop("adapter", None), config.pop("per_device_train_batch_size")
    words = [str(v) for k, v in config.items() if k != "parallelism"] + (["lora"] if adapter else [])
    shown = " ".join(f"{name[:5]} {100 * e:+6.2f}%" for name, e in row["errors"].items())
    return (
        f"{case['number']:3} {case['model'].partition('/')[2] or case['model']:24} {case['capability']} "
        f"{size:3}x{case['length']:<4} x{case['accumulation']} {' '.join(words):56} {shown} "
        f"{memory['allocated_bytes'] / 2**30:6.2f} GiB {','.join(row['attention'] or ())} "
        f"{'' if row['reserved_covered'] else ' outside'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "predict", "report"))
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--family", nargs="*", default=[], help="predict these alone")
    parser.add_argument("--measured", type=Path, default=RESULTS / "allocator-truth-measured.jsonl")
    parser.add_argument("--predicted", type=Path, default=RESULTS / "allocator-truth-predicted.jsonl")
    parser.add_argument("--capability", choices=tuple(DEVICES), help=argparse.SUPPRESS)
    parser.add_argument("--rows", action="store_true", help="print a line for each configuration")
    options = parser.parse_args()
    parts = PARTS if options.part == "all" else (options.part,)
    if options.command == "measure" and options.capability is None:
        measure(parts, options.measured)
    elif options.command == "measure":
        _measure_here(options.capability, parts, options.measured)
    elif options.command == "predict":
        predict(parts, options.measured, options.predicted, options.family)
    else:
        report(parts, options.measured, options.predicted, each=options.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
