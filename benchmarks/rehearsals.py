"""Rehearsals of a plain script against trials of the same trainings, both under torch's real allocator.

    python benchmarks/rehearsals.py [--rows 20]

Needs torch's CUDA build, and no GPU. Of the trials that `allocator_truth.py` has measured, it takes those of one device
without adapter, quantization and compilation whose weights fit the host, evenly from each kind of device. The script is
what a user would write around transformers' Trainer; it knows nothing of autotune. Figures are written to `results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from allocator_plan import Case, workload_of
from allocator_truth import read
from provenance import RESULTS, error_figures, keep

from autotune import rehearse
from autotune.values.hardware import detect
from autotune.values.model import Task

CARDS = {"7.5": "t4", "8.0": "a100-80gb", "8.6": "a40", "9.0": "h100-80gb"}
HEADS = {Task.CAUSAL_LM: "AutoModelForCausalLM", Task.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification"}
MOST_WEIGHTS = 1_600_000_000

SCRIPT = """
import json
import sys

import torch
import transformers
from transformers import AutoConfig, Trainer, TrainingArguments

given = json.loads(sys.argv[1])
config = AutoConfig.from_pretrained("model", use_cache=False)
model = getattr(transformers, given["head"]).from_config(
    config, attn_implementation="sdpa", dtype=getattr(torch, given["dtype"])
)
ids = torch.randint(config.vocab_size, (given["length"],))
labels = ids if given["head"] == "AutoModelForCausalLM" else 1
rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}] * given["samples"]
arguments = TrainingArguments("out", max_steps=3, save_strategy="no", report_to="none", **given["arguments"])
Trainer(model, arguments, train_dataset=rows).train()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=20, help="how many trainings (default: %(default)s)")
    wanted = parser.parse_args().rows
    suited = [
        (case, row["memory"])
        for row in read(RESULTS / "allocator-truth-measured.jsonl")
        if (case := suited_case(row)) is not None
    ]
    suited.sort(key=lambda pair: (pair[0].capability, pair[0].number))
    found = []
    for case, memory in suited[:: max(1, len(suited) // wanted)][:wanted]:
        told = rehearsed(case)
        allocated = max((p.allocated_bytes or 0 for n, p in told.parts.phases.items() if "step" in n), default=0)
        shown = {"allocated_bytes": allocated, "reserved_bytes": told.peak.reserved_bytes, "refused": told.refused}
        found.append({"case": case.model_dump(mode="json", exclude_unset=True), "measured": memory, "rehearsed": shown})
        print(f"{case.model}: {allocated / memory['allocated_bytes'] - 1:+.4%} {told.refused or ''}", flush=True)
    figures = {
        quantity: error_figures([r["rehearsed"][key] / r["measured"][key] - 1 for r in found if r["rehearsed"][key]], 5)
        for quantity, key in (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes"))
    }
    keep("rehearsals", detect("cpu"), {"figures": figures, "rows": found})


def suited_case(row: dict[str, Any]) -> Case | None:
    if row.get("status") != "completed":
        return None
    case = Case(**row["case"])
    config, (workload, facts) = case.config, workload_of(case)
    plain = config.adapter is None and config.quantization is None and config.torch_compile_backend is None
    is_usual = config.attn_implementation == "sdpa" and config.checkpointing in ("none", "full") and not case.soak
    fits = (facts.parameters or MOST_WEIGHTS) < MOST_WEIGHTS and case.capability in CARDS
    return case if plain and is_usual and fits and config.parallelism.is_single and workload.task in HEADS else None


def rehearsed(case: Case) -> Any:
    config, (workload, _) = case.config, workload_of(case)
    arguments = {
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": case.accumulation,
        "optim": config.optim,
        "bf16": config.precision == "bf16",
        "fp16": config.precision == "fp16",
        "gradient_checkpointing": config.checkpointing == "full",
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    given = {
        "head": HEADS[workload.task],
        "dtype": "bfloat16" if config.precision == "pure_bf16" else "float32",
        "length": case.length,
        "samples": 3 * case.accumulation * config.per_device_train_batch_size,
        "arguments": arguments,
    }
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            Path("train.py").write_text(SCRIPT)
            Path("model").mkdir()
            of_model = {**workload.model.config, "model_type": workload.model.model_type}
            Path("model", "config.json").write_text(json.dumps(of_model))
            return rehearse(gpu=CARDS[case.capability], script=["python", "train.py", json.dumps(given)])
        finally:
            os.chdir(here)


if __name__ == "__main__":
    main()
