"""Predicted against measured: peak memory and time of real trials, on a GPU or on the CPU, as data.

    python benchmarks/peaks.py [--device cpu] [--models a b ...] [--seconds 900] [--out FILE]

For each model it runs a handful of configurations as trials, exactly as a search would, and writes for each what was
predicted before (uncorrected), what was predicted after learning from the model's first three trials, and what was
measured; on a GPU also where a step spends its time, beside the predicted parts. The last line is one JSON object of
figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pack.trials import request_of
from provenance import error_figures, keep

from autotune.cost.family import family_of, shape_of
from autotune.cost.model import CostModel
from autotune.cost.profiler import profile
from autotune.errors import AutotuneError
from autotune.execution.runner import LocalRunner
from autotune.space.rules import refusals
from autotune.storage.home import rates_of
from autotune.training.build import describe
from autotune.training.resolve import default_task, resolve
from autotune.values.budget import ProfileTask
from autotune.values.config import TrainConfig
from autotune.values.hardware import Hardware, detect
from autotune.values.techniques import LoraAdapter
from autotune.values.trial import Purpose, TrialResult
from autotune.values.workload import Workload

# Small enough for two cores; on a GPU the larger ones of the same kinds.
MODELS = {
    "cpu": [
        "bert-small", "distilbert-base-uncased", "google/electra-small-discriminator", "EleutherAI/pythia-70m",
        "facebook/opt-125m", "t5-small", "deit-tiny-patch16-224", "resnet-18", "facebook/bart-base", "distilgpt2",
    ],
    "cuda": ["bert-large-uncased", "gpt2-medium", "t5-base", "vit-base-patch16-224", "Qwen/Qwen3-0.6B"],
}  # fmt: skip

LEARNED_FROM = 3


def configurations(hardware: Hardware) -> list[TrainConfig]:
    """Return what is tried with each model, what teaches most first."""
    small, large = (4, 8) if hardware.is_cpu else (8, 32)
    bf16, eager = {"precision": "bf16"}, {"attn_implementation": "eager"}
    rows: list[tuple[int, dict[str, Any]]] = [
        (large, {}),
        (small, bf16),
        (large, {**bf16, "checkpointing": "full"}),
        (small, {"optim": "adamw_torch", **eager}),
        (small, {"optim": "adafactor"}),
        (large, {"precision": "pure_bf16", "optim": "adamw_bnb_8bit"}),
        (large, {**bf16, **eager}),
        (small, {"adapter": LoraAdapter()}),
    ]
    if not hardware.is_cpu:
        rows += [(small, {"precision": "fp16"}), (large, {"optim": "adamw_torch", "checkpointing": "full"})]
    usual = {"optim": "adamw_torch_fused", "attn_implementation": "sdpa"}
    return [TrainConfig(per_device_train_batch_size=size, **{**usual, **fields}) for size, fields in rows]


def run_model(name: str, hardware: Hardware, rows: list[dict[str, Any]], deadline: float, sequence: int) -> None:
    """Run the configurations of one model, as far as they are legal, and add a row for each."""
    spec = resolve(name)
    task = default_task(spec)
    facts = describe(spec, task)
    length, batch = min(sequence, facts.max_sequence_length or sequence), 8 if hardware.is_cpu else 32
    lengths = {"sequence_length": length, "target_length": length}
    workload = Workload(model=spec, task=task, **lengths, global_batch_size=batch)
    configs = []
    for config in configurations(hardware):
        kernel = config.attn_implementation if facts.attn_implementations else None
        config = config.model_copy(update={"attn_implementation": kernel})  # noqa: PLW2901
        if next(refusals(config, workload, facts, hardware), None) is None and config not in configs:
            configs.append(config)
    started = time.monotonic()
    families = {family_of(c, hardware): None for c in configs}
    profiles = [profile(spec, f, shape_of(workload), parameters=facts.parameters) for f in families]
    print(f"{name}: {len(families)} families traced in {time.monotonic() - started:.1f} s", flush=True)
    model = learned = CostModel.of(workload, hardware, rates_of(hardware), profiles)
    with tempfile.TemporaryDirectory() as scratch, LocalRunner(Path(scratch), hardware) as runner:
        for number, config in enumerate(configs):
            if time.monotonic() > deadline:
                return
            request = request_of(number, config, workload, hardware, measure_steps=6, relative_interval=0.04)
            result = runner.run(request)
            rows.append(_row(name, config, result, model, learned))
            if not hardware.is_cpu and result.measurement is not None:
                profiled = {"number": 100 + number, "purpose": Purpose.PROFILE, "task": ProfileTask()}
                again = runner.run(request.model_copy(update=profiled)).measurement
                rows[-1]["busy_s"] = again.busy_s if again is not None else None
            print(_line(rows[-1]), flush=True)
            if number < LEARNED_FROM:
                learned = learned.observe(result)


def _row(name: str, config: TrainConfig, result: TrialResult, model: CostModel, learned: CostModel) -> dict[str, Any]:
    before, after = model.estimate(config), learned.estimate(config)
    row: dict[str, Any] = {
        "model": name,
        "config": config.model_dump(mode="json", exclude_defaults=True),
        "status": str(result.status),
        "learned_from": min(LEARNED_FROM, result.request.number),
    }
    if before and after:
        row |= {"predicted": before.model_dump(mode="json"), "corrected": after.model_dump(mode="json")}
    if measured := result.measurement:
        row |= {"memory": measured.memory.model_dump(mode="json"), "peak_bytes": measured.memory.peak_bytes}
        row["samples_per_second"] = measured.samples_per_second
    else:
        row["cause"] = result.outcome.cause  # type: ignore[union-attr]
    return row


def _line(row: dict[str, Any]) -> str:
    if "peak_bytes" not in row:
        return f"  {row['config']}: {row['status']}: {row.get('cause')}"
    errors = ", ".join(f"{k} {v:+.1%}" for k, v in _errors(row).items())
    return f"  {row['config']}: measured {row['peak_bytes'] / 2**20:.0f} MiB, {errors}"


def _errors(row: dict[str, Any]) -> dict[str, float]:
    """Return predicted over measured less one, by quantity."""
    predicted, corrected, memory = row["predicted"], row["corrected"], row["memory"]
    found = {
        "peak": predicted["memory"]["device_peak_bytes"] / row["peak_bytes"] - 1,
        "rate": predicted["samples_per_second"] / row["samples_per_second"] - 1,
    }
    for name in ("allocated", "reserved"):
        if memory.get(f"{name}_bytes"):
            found[name] = predicted["memory"][f"{name}_peak_bytes"] / memory[f"{name}_bytes"] - 1
    if row["learned_from"] >= LEARNED_FROM:
        found["corrected peak"] = corrected["memory"]["device_peak_bytes"] / row["peak_bytes"] - 1
        found["corrected rate"] = corrected["samples_per_second"] / row["samples_per_second"] - 1
    return found


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors over all rows, by quantity."""
    collected: dict[str, list[float]] = {}
    for row in rows:
        if "peak_bytes" in row and "predicted" in row:
            for name, error in _errors(row).items():
                collected.setdefault(name, []).append(error)
    summary: dict[str, Any] = {"trials": len(rows), "measured": sum("peak_bytes" in r for r in rows)}
    return summary | {name: {**error_figures(errors, 4), "n": len(errors)} for name, errors in collected.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--sequence", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    hardware = detect(options.device)
    deadline = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    for name in options.models or MODELS[hardware.kind]:
        try:
            run_model(name, hardware, rows, deadline, options.sequence or (64 if hardware.is_cpu else 512))
        except AutotuneError as error:
            print(f"{name}: {error}", file=sys.stderr)
    summary = figures(rows)
    keep("peaks", hardware, {"figures": summary, "rows": rows}, options.out)
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
