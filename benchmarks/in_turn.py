"""Is a training step a line in the model's depth? All depths in one process, in turn, so that one noise hits them all.

    MALLOC_MMAP_THRESHOLD_=131072 OMP_NUM_THREADS=1 python benchmarks/in_turn.py [--rounds 8] [--out FILE]

The truth behind `shallow.py`, whose trials run apart and meet a shared machine at different moments. In each round each
depth takes a burst of steps (the first of which finds its weights evicted by the others and doesn't count), timed by
the seconds the process had a core. CPU only. The last line is one JSON object: by model and micro-batch the errors of
lines through two depths at the full one, of each round, and their median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from provenance import provenance, results_path
from shallow import LAYERS, MODELS, SMALL_DEPTHS

from autotune.training.build import build_config, build_model
from autotune.training.depth import shallower
from autotune.value import write_text
from autotune.values.hardware import detect
from autotune.values.model import ModelSpec, Task

CASES = (("llama-256", 4), ("llama-256", 1), ("bert-256", 4), ("llama-512", 1))
BURST_LAYERS = 12  # steps of a burst, times the depth
LENGTH = 128


class Trained:
    """A model of some depth with its optimizer."""

    def __init__(self, spec: ModelSpec, task: Task, depth: int) -> None:
        import torch

        config = shallower(build_config(spec, task), {"num_hidden_layers": depth})
        self._model: Any = build_model(spec, task, dtype="float32", device="cpu", config=config)
        self._model.config.use_cache = False
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)

    def step_s(self, ids: Any) -> float:
        """Train a step; return its seconds of a core."""
        import torch

        started = time.process_time()
        self._model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.process_time() - started


def rounds_of(name: str, micro_batch: int, rounds: int) -> dict[int, list[float]]:
    """Return by depth the seconds of a step in each round, the first of which makes the optimizer's states."""
    import torch

    figures = MODELS[name]
    kind, task = ("encoder", Task.MASKED_LM) if figures["model_type"] == "bert" else ("decoder", Task.CAUSAL_LM)
    spec = ModelSpec(
        reference=name, name=name, source="catalogue", model_type=figures["model_type"], kind=kind, config=figures
    )
    models = {depth: Trained(spec, task, depth) for depth in (*SMALL_DEPTHS, LAYERS)}
    ids = torch.randint(figures["vocab_size"], (micro_batch, LENGTH))
    found: dict[int, list[float]] = {depth: [] for depth in models}
    for _ in range(rounds + 1):
        for depth, model in models.items():
            evicted = [model.step_s(ids)]
            found[depth].append(statistics.fmean([model.step_s(ids) for _ in range(BURST_LAYERS // depth)] or evicted))
    return {depth: times[1:] for depth, times in found.items()}


def errors(times: dict[int, list[float]]) -> list[dict[str, Any]]:
    """Return for each pair of depths how far the line through them is off at full depth."""
    found = []
    for low, high in itertools.combinations(SMALL_DEPTHS, 2):
        lines = [b + (b - a) * (LAYERS - high) / (high - low) for a, b in zip(times[low], times[high], strict=True)]
        off = [line / full - 1 for line, full in zip(lines, times[LAYERS], strict=True)]
        found.append(
            {
                "depths": (low, high),
                "median": round(statistics.median(off), 4),
                "spread": round(statistics.pstdev(off), 4),
                "rounds": [round(error, 4) for error in off],
            }
        )
    return found


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    hardware = detect("cpu")
    out = options.out or results_path("shallow-in-turn", hardware).with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    times: dict[str, dict[int, list[float]]] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, micro_batch in CASES:
        case = f"{name}, micro-batch {micro_batch}"
        times[case] = rounds_of(name, micro_batch, options.rounds)
        found[case] = errors(times[case])
        for row in found[case]:
            print(f"{case}, {row['depths']}: {row['median']:+.1%}, a round {row['spread']:.1%}", flush=True)
        document = {**provenance(hardware), "layers": LAYERS, "errors": found, "step_times_s": times}
        write_text(json.dumps(document, indent=1) + "\n", out)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
