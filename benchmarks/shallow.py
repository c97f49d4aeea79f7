"""Does a shallow model tell what the deep one takes? Real trials at small depths and at the full one, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/shallow.py [--device cpu] [--models a ...] [--rounds 3] [--out FILE]

Step time and peak memory of the full depth are inferred as a line through two small depths, and compared with trials at
full depth. Every step's moments are kept, by wall clock and by the time the process had a core, so that warm-up and
the parts of a step (micro-step, optimizer) can be looked at; on a shared machine the second clock is the one to trust.
The last line is one JSON object: by model, configuration and pair of depths the errors and the share of the cost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from provenance import provenance, results_path

from autotune.execution.runner import LocalRunner, trial_directory
from autotune.training.build import default_task
from autotune.training.resolve import resolve
from autotune.value import write_text
from autotune.values.config import TrainConfig, Workload
from autotune.values.hardware import Hardware, default_budget_bytes, detect
from autotune.values.trial import Limits, Purpose, TrialRequest

MOMENTS_FILE = "moments.json"
LAYERS = 24
SMALL_DEPTHS = (1, 2, 3, 4, 6)
STEPS = 6  # the first one makes the optimizer's states

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}
_BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "max_position_embeddings": 512}


def _figures(kind: dict[str, Any], hidden: int, intermediate: int, vocabulary: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocabulary}
    return {**kind, **sizes, "num_attention_heads": hidden // 64, "num_hidden_layers": LAYERS}


# A layer's weights, gradients and AdamW states: 13 MB at width 256, 50 MB at 512 (a processor's cache has some 32 MB).
MODELS = {
    "llama-256": _figures(_LLAMA, 256, 688, 4096),
    "bert-256": _figures(_BERT, 256, 1024, 4096),
    "llama-512": _figures(_LLAMA, 512, 1376, 4096),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fused AdamW, micro-batch 4": {"per_device_train_batch_size": 4},
    "fused AdamW, micro-batch 1": {"per_device_train_batch_size": 1},
    "checkpointing, micro-batch 4": {"per_device_train_batch_size": 4, "checkpointing": "full"},
    "Adafactor, micro-batch 4": {"per_device_train_batch_size": 4, "optim": "adafactor"},
}
# The widest one takes too long for more.
CONFIGS_OF = {"llama-512": ("fused AdamW, micro-batch 1",)}
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "least": min,
    "lower quartile": lambda times: statistics.quantiles(times, n=4, method="inclusive")[0],
    "median": statistics.median,
    "mean": statistics.fmean,
}


def record_trial(directory: Path) -> None:
    """Run a trial as ever, and write down when each part of each step began: entered by the launcher."""
    from autotune.execution import measure, worker

    moments: list[tuple[str, float, float]] = []

    class Recorded(measure.StepTimer):
        def _note(self, name: str) -> None:
            moments.append((name, time.perf_counter(), time.process_time()))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_begin(args, state, control, **kwargs)
            self._note("begin")

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._note("optimizer")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_end(args, state, control, **kwargs)
            self._note("end")

    measure.StepTimer = Recorded  # type: ignore[misc]
    worker.run_trial(directory)
    write_text(json.dumps(moments), directory / MOMENTS_FILE)


def steps_of(moments: list[tuple[str, float, float]]) -> list[dict[str, float]]:
    """Return for each step but the first its wall and core seconds, and those of its optimizer."""
    ends = [m for m in moments if m[0] == "end"]
    optimizers = [m for m in moments if m[0] == "optimizer"]
    return [
        {
            "wall_s": end[1] - before[1],
            "core_s": end[2] - before[2],
            "optimizer_core_s": end[2] - middle[2],
        }
        for (before, end), middle in zip(itertools.pairwise(ends), optimizers[1:], strict=True)
    ]


def trials(model: Path, hardware: Hardware, depths: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each trial: all depths of a configuration in turn, round by round."""
    spec = resolve(str(model))
    workload = Workload(model=spec, task=default_task(spec), sequence_length=128, global_batch_size=None)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        with LocalRunner(directory, hardware, entry="shallow:record_trial") as runner:
            wanted = itertools.product(range(rounds), CONFIGS_OF.get(model.name, tuple(CONFIGS)), depths)
            for number, (turn, name, depth) in enumerate(wanted):
                config = TrainConfig(attn_implementation="sdpa", dataloader_pin_memory=False, **CONFIGS[name])
                result = runner.run(_request(number, config, workload, hardware, depth))
                if result.measurement is None:
                    raise SystemExit(f"{name}, {depth} layers: {result.outcome.cause}")  # type: ignore[union-attr]
                moments = json.loads((trial_directory(directory, number) / MOMENTS_FILE).read_text())
                yield {
                    "round": turn,
                    "configuration": name,
                    "depth": depth,
                    "peak_bytes": result.measurement.memory.peak_bytes,
                    "step_times_s": result.measurement.step_times_s,
                    "steps": steps_of(moments) if hardware.is_cpu else [],
                    "core_s": moments[-1][2],
                    "startup_s": result.measurement.startup_s,
                    "duration_s": result.duration_s,
                }


def _request(number: int, config: TrainConfig, workload: Workload, hardware: Hardware, depth: int) -> TrialRequest:
    limits = Limits(
        memory_bytes=default_budget_bytes(hardware),
        timeout_s=600,
        discarded_steps=1,
        measure_steps=STEPS,
        measure_time_s=600,
        relative_interval=1e-9,
    )
    return TrialRequest(
        number=number,
        purpose=Purpose.PROBE,
        config=config,
        workload=workload,
        device=hardware.device,
        accumulation_steps=1,
        limits=limits,
        depths={"num_hidden_layers": depth},
    )


def errors(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each configuration and pair of depths how far the line through them is off at full depth."""
    found = []
    for name in dict.fromkeys(row["configuration"] for row in rows):
        known = {
            d: [r for r in rows if r["configuration"] == name and r["depth"] == d] for d in (*SMALL_DEPTHS, LAYERS)
        }
        for pair in itertools.combinations(SMALL_DEPTHS, 2):
            if not known[LAYERS]:
                continue
            found.append({"configuration": name, "depths": pair, **_errors(known, pair)})
    return found


def _errors(known: dict[int, list[dict[str, Any]]], pair: tuple[int, int]) -> dict[str, Any]:
    def error(figure: Callable[[list[dict[str, Any]]], float]) -> float:
        low, high = (figure(known[depth]) for depth in pair)
        line = high + (high - low) * (LAYERS - pair[1]) / (pair[1] - pair[0])
        return round(line / figure(known[LAYERS]) - 1, 4)

    def of_steps(clock: str, statistic: Callable[[Sequence[float]], float]) -> Callable[[list[dict[str, Any]]], float]:
        return lambda rows: statistic([step[clock] for row in rows for step in row["steps"][1:]])

    def cost(depth: int) -> float:
        """Return what a trial takes, start included, in a time that others on the machine don't lengthen."""
        return statistics.median(row["core_s" if row["steps"] else "duration_s"] for row in known[depth])

    clocks = ("wall_s", "core_s", "optimizer_core_s") if known[LAYERS][0]["steps"] else ()
    return {
        "memory": error(lambda rows: statistics.median(row["peak_bytes"] for row in rows)),
        "time": error(lambda rows: statistics.fmean(t for row in rows for t in row["step_times_s"])),
        **{f"{clock}, {name}": error(of_steps(clock, find)) for clock in clocks for name, find in STATISTICS.items()},
        "cost": round(sum(map(cost, pair)) / cost(LAYERS), 3),
    }


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    hardware = detect(options.device)
    rows: dict[str, list[dict[str, Any]]] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    out = options.out or results_path("shallow", hardware).with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            model = Path(scratch) / name
            model.mkdir()
            write_text(json.dumps(MODELS[name]), model / "config.json")
            rows[name] = []
            for row in trials(model, hardware, (*SMALL_DEPTHS, LAYERS), options.rounds):
                rows[name].append(row)
                core = statistics.median(step["core_s"] for step in row["steps"][1:]) if row["steps"] else 0.0
                print(
                    f"{name}, {row['configuration']}, {row['depth']:2} layers: {row['peak_bytes'] / 2**20:6.0f} MiB, "
                    f"{statistics.fmean(row['step_times_s']):.3f} s a step ({core:.3f} s of a core)",
                    flush=True,
                )
                if row["depth"] == LAYERS:  # the last of its round
                    found[name] = errors(rows[name])
                    document = {**provenance(hardware), "layers": LAYERS, "errors": found, "rows": rows}
                    write_text(json.dumps(document, indent=1) + "\n", out)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
