"""What each technique saves and costs, predicted and measured: memory and time in shares of plain fp32 training.

    python benchmarks/techniques.py [--device cpu] [--models a b ...] [--out FILE]

Configurations run as trials, exactly as a search would run them. The last line is one JSON object: by model and
technique the predicted and the measured share of the baseline's peak memory and of its time a sample.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from peaks import run_model
from provenance import provenance, results_path

from autotune.values.adapters import LoraAdapter
from autotune.values.config import TrainConfig
from autotune.values.hardware import detect

MODELS = {"cpu": ["bert-small", "t5-small", "distilgpt2"], "cuda": ["bert-large-uncased", "t5-base"]}
LARGE, SMALL = 8, 1

PLAIN = {"per_device_train_batch_size": LARGE, "attn_implementation": "eager"}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "checkpointing, every layer": {**PLAIN, "checkpointing": "full"},
    "checkpointing, every second layer": {**PLAIN, "checkpointing": "every-2nd"},
    "sdpa": {**PLAIN, "attn_implementation": "sdpa"},
    "bf16": {**PLAIN, "precision": "bf16"},
    "pure bf16": {**PLAIN, "precision": "pure_bf16"},
    "Adafactor": {**PLAIN, "optim": "adafactor"},
    "8-bit Adam": {**PLAIN, "optim": "adamw_bnb_8bit"},
    "the loss in chunks": {**PLAIN, "chunked_loss": True},
    "compiled": {**PLAIN, "torch_compile_backend": "inductor"},
    "compiled, half of the activations": {
        **PLAIN,
        "torch_compile_backend": "inductor",
        "activation_memory_budget": 0.5,
    },
    "LoRA": {**PLAIN, "adapter": LoraAdapter()},
    "LoRA on nf4": {**PLAIN, "adapter": LoraAdapter(), "quantization": "nf4"},
    f"micro-batch {SMALL}": {**PLAIN, "per_device_train_batch_size": SMALL},
    f"micro-batch {SMALL}, bf16": {**PLAIN, "per_device_train_batch_size": SMALL, "precision": "bf16"},
}


def shares(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return by technique the shares of plain training, of rows in the order of `TECHNIQUES`."""
    names = {TrainConfig(**fields).config_id: name for name, fields in TECHNIQUES.items()}
    known = {names.get(TrainConfig(**row["config"]).config_id): row for row in rows if "peak_bytes" in row}
    plain = known["plain"]
    found = {}
    for name, row in known.items():
        if name is not None:
            found[name] = {
                "predicted memory": _memory(row["predicted"]) / _memory(plain["predicted"]),
                "measured memory": row["peak_bytes"] / plain["peak_bytes"],
                "predicted time": plain["predicted"]["samples_per_second"] / row["predicted"]["samples_per_second"],
                "measured time": plain["samples_per_second"] / row["samples_per_second"],
            }
    return found


def _memory(estimate: dict[str, Any]) -> float:
    return float(estimate["memory"]["device_peak_bytes"])


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    hardware = detect(options.device)
    figures, everything = {}, {}
    for name in options.models or MODELS[hardware.kind]:
        rows: list[dict[str, Any]] = []
        wanted = [TrainConfig(**fields) for fields in TECHNIQUES.values()]
        run_model(name, hardware, rows, math.inf, 128 if hardware.is_cpu else 512, wanted)
        everything[name], figures[name] = rows, shares(rows)
    out = options.out or results_path("techniques", hardware).with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**provenance(hardware), "figures": figures, "rows": everything}, indent=1) + "\n")
    for name, found in figures.items():
        print(f"{name:36}{'memory':>20}{'time':>20}\n{'':36}{'predicted, measured':>20}{'predicted, measured':>20}")
        for technique, share in found.items():
            memory = f"{share['predicted memory']:.0%}, {share['measured memory']:.0%}"
            print(f"  {technique:34}{memory:>20}{share['predicted time']:>12.0%}, {share['measured time']:.0%}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
