"""Predicted peaks of people's own modules and losses against what torch's allocator counts, by the stand-in for CUDA.

    python benchmarks/custom_trainings.py [--only NAME ...] [--device cpu]

Needs an environment with the stand-in (tests/fakecuda). Each training of `tests/own_modules.py` is planned as `autotune
script` plans it; three configurations run as trials. What isn't predicted is told with its reason. As the stand-in
computes nothing, time is compared on a CPU, of each training as it is. Figures are written to `results/`.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
from pathlib import Path
from typing import Any

from measured_searches import planned_search
from provenance import error_figures, keep

from autotune.errors import AutotuneError
from autotune.search.cost_model import cost_model, measured_model
from autotune.values.config import TrainConfig
from autotune.values.hardware import detect
from autotune.values.problem import Note
from autotune.values.trial import Purpose

SCRIPT = Path(__file__).parents[1] / "tests" / "own_modules.py"
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "bf16", "per_device_train_batch_size": 16},
    {"precision": "fp16", "per_device_train_batch_size": 4, "optim": "adafactor"},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = list(runpy.run_path(str(SCRIPT))["MADE"])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--device", choices=("cpu", "cuda:0"), default="cuda:0")
    options = parser.parse_args()
    rows = [row for name in options.only for row in compared(name, options.device)]
    done = [row for row in rows if "measured" in row]
    figures = {
        quantity: error_figures([r["predicted"][quantity] / r["measured"][quantity] - 1 for r in done], 5)
        for quantity in done[0]["measured"]
    }
    is_cpu = options.device == "cpu"
    keep(
        "speed-of-custom-trainings" if is_cpu else "custom-trainings", detect("cpu"), {"figures": figures, "rows": rows}
    )


def compared(name: str, device: str) -> list[dict[str, Any]]:
    """Return a row for each configuration of a training, predicted and measured, or one with the reason."""
    command = ["python", str(SCRIPT), name, "--output_dir", "out", "--per_device_train_batch_size", "16"]
    notes: list[str] = []

    def note(event: object) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    rows = []
    with contextlib.ExitStack() as stack:
        try:
            search = planned_search({"model": "", "device": device}, note, command)
            plan, backend, run_directory, _ = stack.enter_context(search)
        except AutotuneError as error:
            return [refused(name, str(error))]
        model = cost_model(plan, backend.asker, run_directory, note, most_s=600.0)
        if model is None:
            return [refused(name, next(text for text in notes if text.startswith("no prediction")))]
        if device == "cpu":  # as a search does before its first trial
            model = measured_model(plan, model, backend.asker)
        for number, changes in enumerate(CHANGES if device != "cpu" else CHANGES[:1]):
            config = TrainConfig.model_validate({**plan.baseline.model_dump(), **changes})
            told = model.estimate(config)
            result = backend.pool.run(plan.request_of(config, Purpose.SEARCH, number=number, timeout_s=300.0))
            if told is None or result.measurement is None:
                raise AutotuneError(f"{name}: {result.status}: {result.outcome}")
            memory = result.measurement.memory
            measured: dict[str, Any] = {"allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes}
            predicted = {key: getattr(told.memory, f"{key}_peak_bytes") for key in measured}
            if device == "cpu":
                measured = {"samples_per_second": result.measurement.samples_per_second}
                predicted = {"samples_per_second": told.samples_per_second}
            rows.append({"training": name, "changes": changes, "predicted": predicted, "measured": measured})
            errors = (f"{key} {predicted[key] / value - 1:+.2%}" for key, value in measured.items() if value)
            print(f"{name}: {changes or 'as it is'}: {', '.join(errors)}", flush=True)
    return rows


def refused(name: str, why: str) -> dict[str, Any]:
    print(f"{name}: {why}", flush=True)
    return {"training": name, "refused": why}


if __name__ == "__main__":
    main()
