"""How well predicted throughput orders configurations: rank correlation with recorded and published tables.

    python benchmarks/ranking.py [TABLE ...] [--rows FILE]
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/ranking.py --trials 20    # on an otherwise idle machine

Spearman's correlation over the configurations of each table that completed, and the share of pairs in the right order;
pairs whose measured rates are within 5 % of each other are left out of the latter and, by giving both the same rank, of
the former. Rates are those of a data sheet, nothing is learned; with `--measure` operators of the recorded tables'
models are measured on this machine before, as a search does. The last line is one JSON object, which `--out` keeps.

With `--trials` that many points of each recorded table, drawn by a fixed seed, are predicted before any trial, as a
search does that knows nothing of the machine (operators measured for its few seconds), and then run as trials here. For
each model and for all together: errors of predicted over measured seconds, with operators measured, by the data sheet,
and after the first of the trials was learned; how many lie in their 95 % intervals and how wide these are.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from predictor import _UNTRACED, ROWS, _Key, _traced
from provenance import provenance, results_path
from published.rows import NotPredicted, load_rows
from published.scores import Score
from published.setups import Setup, setup_of
from published.zero import stages_of
from search import TABLES
from searching.samplers import model_of
from searching.tables import load_table, plan_of

from autotune.cost.attainable import table_rates
from autotune.cost.model import CostModel
from autotune.cost.operator_benchmark import timings_of
from autotune.cost.profile import Profile
from autotune.cost.time import StepCost
from autotune.execution.runner import LocalRunner
from autotune.planning.plan import SearchPlan, request_of
from autotune.search.cost_model import measured_model, model_by_data_sheet, wanted_timings
from autotune.training.resolve import resolve
from autotune.values.estimate import CostEstimate, Rates
from autotune.values.hardware import default_budget_bytes, detect
from autotune.values.trial import Purpose, TrialResult

NEAR = 0.05

# A published table of fewer rows says little.
LEAST_ROWS = 6


def concordance(predicted: list[float], measured: list[float]) -> dict[str, Any]:
    """Return Goodman and Kruskal's gamma and the share of pairs in the right order, near pairs left out."""
    right = total = 0
    for (p, m), (q, n) in itertools.combinations(zip(predicted, measured, strict=True), 2):
        if abs(m - n) <= NEAR * max(m, n):
            continue
        total += 1
        right += (p > q) == (m > n)
    share = right / total if total else float("nan")
    return {"pairs": total, "right": round(share, 4), "gamma": round(2 * share - 1, 4)}


def spearman(predicted: list[float], measured: list[float]) -> float:
    """Return Spearman's rank correlation; measured rates within 5 % of their neighbour share a rank."""
    order = np.argsort(measured)
    levels = np.zeros(len(measured))
    level, start = 0.0, measured[order[0]]
    for index in order:
        if measured[index] > start * (1 + NEAR):
            level, start = level + 1, measured[index]
        levels[index] = level
    return float(np.corrcoef(_ranks(np.array(predicted)), _ranks(levels))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks, ties sharing their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def published(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of each published table: rows of one source, model and single device, at least six of them."""
    traced = functools.cache(functools.partial(_traced, whole=False))
    tables: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in load_rows(path):
        if row.n_gpus != 1 or not row.throughput:
            continue
        try:
            setup = setup_of(row)
            rate = _published_rate(setup, traced(_Key(setup)))
        except (NotPredicted, *_UNTRACED):
            continue
        tokens = (row.seq_len or 1) if row.throughput_unit.startswith("token") else 1
        tables[row.group, row.model, setup.gpu.name].append((rate * tokens, row.throughput))
    for (group, model, gpu), rates in tables.items():
        if len(rates) >= LEAST_ROWS and max(m for _, m in rates) > (1 + NEAR) * min(m for _, m in rates):
            predicted, measured = map(list, zip(*rates, strict=True))
            yield _figures(f"{group}: {model} on {gpu}", predicted, measured)


def by_stage(path: Path) -> Iterator[dict[str, Any]]:
    """Yield for each model of DeepSpeed's tables the order of its ZeRO stages, predicted and measured."""
    traced = functools.cache(functools.partial(_traced, whole=False))
    for model, stages in stages_of(load_rows(path), lambda setup: traced(_Key(setup))).items():
        predicted, measured = ([rates[i] for rates in stages.values()] for i in (0, 1))
        yield {
            "table": f"ZeRO stages: {model} on 16 V100",
            "configurations": len(stages),
            **concordance(predicted, measured),
            "rates": {name: [round(p, 1), m] for name, (p, m) in stages.items()},
        }


def _published_rate(setup: Setup, profile: Profile) -> float:
    """Return samples per second by the data sheet of the row's device."""
    gpu, size = setup.gpu, np.array([float(setup.micro_batch)])
    rates = table_rates(gpu.peak_flops, gpu.bandwidth, gpu.capability, name=gpu.name)
    steps = np.array([float(setup.accumulation)])
    return float(steps[0] * size[0] / StepCost(profile, rates, setup.optim).seconds(size, steps)[0])


def _figures(name: str, predicted: list[float], measured: list[float]) -> dict[str, Any]:
    return {
        "table": name,
        "configurations": len(predicted),
        "spearman": round(spearman(predicted, measured), 4),
        **concordance(predicted, measured),
    }


def main() -> None:
    """Print the figures of each table, or of trials."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="*", default=sorted(TABLES.glob("*.jsonl")))
    parser.add_argument("--rows", type=Path, default=ROWS, help="published measurements, one JSON object a line")
    parser.add_argument("--measure", action="store_true", help="measure the operators of recorded models here")
    parser.add_argument("--trials", type=int, help="run so many points of each recorded table here, and nothing else")
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args()
    if options.trials:
        return _run_trials(options.tables, options.trials, options.out)
    figures = [*recorded(options.tables, measure=options.measure), *published(options.rows)]
    stages = list(by_stage(options.rows))
    for row in stages:
        print(f"{row['table']}: {row['right']:.1%} of {row['pairs']} pairs in order; {row['rates']}")
    for row in figures:
        print(
            f"{row['table']}: {row['configurations']} configurations, Spearman {row['spearman']:.3f}, "
            f"{row['right']:.1%} of {row['pairs']} pairs in order"
        )
    print(json.dumps([*figures, *stages]))
    if options.out is not None:
        content = {**provenance(detect("cpu")), "measured": options.measure, "figures": [*figures, *stages]}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def recorded(paths: list[Path], *, measure: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the figures of each recorded table; `measure`: with operators as this machine runs them."""
    for path in paths:
        table = load_table(path)
        plan = plan_of(table, effort=table.header.budget.effort)
        model = model_of(table, plan)
        if measure:
            model = replace(model, rates=_measured(model, plan))
        points = [p for p in table.points if p.samples_per_second]
        predictions = model.predict([p.config for p in points])
        known = [i for i, rate in enumerate(predictions.samples_per_second) if not np.isnan(rate)]
        predicted = [float(predictions.samples_per_second[i]) for i in known]
        measured = [float(points[i].samples_per_second or 0.0) for i in known]
        yield _figures(path.name, predicted, measured)


def _measured(model: CostModel, plan: SearchPlan) -> Rates:
    """Return a model's rates with the timings of all operators and optimizers of a plan."""
    request = wanted_timings(plan, list(model.profiles.values()), model.rates, limit_s=120)
    return model.rates if request is None else model.rates.model_copy(update={"timings": timings_of(request)})


def _run_trials(paths: Sequence[Path], count: int, out: Path | None) -> None:
    """Print and keep what trials here say of predictions before any trial."""
    rows = [row for path in paths for row in trials_of(path, count)]
    models = dict.fromkeys(row["model"] for row in rows)
    figures = {name: figures_of_trials([r for r in rows if r["model"] == name]) for name in models}
    figures["all"] = figures_of_trials(rows)
    path = out or results_path("ranking-trials", detect("cpu")).with_suffix(".json")
    content = {**provenance(detect("cpu")), "figures": figures, "trials": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


def trials_of(path: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each of `count` points of a table that were trained here, predictions made before the first."""
    table = load_table(path)
    recorded, hardware = plan_of(table, effort=table.header.budget.effort), detect("cpu")
    spec = resolve(str(TABLES / "models" / recorded.workload.model.name))
    changes = {"workload": recorded.workload.model_copy(update={"model": spec}), "hardware": hardware}
    plan = recorded.model_copy(update={**changes, "memory_bytes": default_budget_bytes(hardware)})
    completed = [p.config for p in table.points if p.samples_per_second]
    configs = random.Random(0).sample(completed, min(count, len(completed)))
    with tempfile.TemporaryDirectory() as scratch, LocalRunner(Path(scratch), hardware) as runner:
        os.environ["AUTOTUNE_HOME"] = scratch  # nothing is known of the machine, and nothing is kept
        by_sheet = model_by_data_sheet(plan)
        measured = measured_model(plan, by_sheet, runner)
        learned: CostModel | None = None
        for number, config in enumerate(configs):
            timeout_s = plan.budget.trial_timeout_s
            result = runner.run(request_of(plan, config, Purpose.SEARCH, number=number, timeout_s=timeout_s))
            models = {"operators measured": measured, "data sheet": by_sheet, "one trial learned": learned}
            known = {name: model and model.estimate(config) for name, model in models.items()}
            row = _row(spec.name, result, {name: found for name, found in known.items() if found})
            print(json.dumps(row), flush=True)
            yield row
            if learned is None and result.measurement:
                learned = measured.observe(result)


def _row(name: str, result: TrialResult, estimates: dict[str, CostEstimate]) -> dict[str, Any]:
    """Return what is kept of a trial: samples per second, measured, and predicted with their intervals."""
    config = result.request.config.model_dump(mode="json", exclude_defaults=True)
    row: dict[str, Any] = {"model": name, "config": config, "status": str(result.status), "predicted": {}}
    if result.measurement:
        row["samples_per_second"] = result.measurement.samples_per_second
    for way, estimate in estimates.items():
        interval = estimate.samples_per_second_interval
        row["predicted"][way] = [estimate.samples_per_second, interval.low, interval.high]
    return row


def figures_of_trials(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return errors, coverage and typical half width by the way of predicting; rank correlation of one model's rows."""
    figures: dict[str, Any] = {"trials": len(rows), "completed": sum("samples_per_second" in row for row in rows)}
    completed = [row for row in rows if "samples_per_second" in row]
    for way in dict.fromkeys(way for row in completed for way in row["predicted"]):
        found = [(row["samples_per_second"], *row["predicted"][way]) for row in completed if way in row["predicted"]]
        score = Score.of(rate / predicted - 1 for rate, predicted, _, _ in found)
        assert score is not None
        figures[way] = {
            **score.as_json(),
            "in interval": round(float(np.mean([low <= rate <= high for rate, _, low, high in found])), 4),
            "half width": round(float(np.median([high / predicted - 1 for _, predicted, _, high in found])), 4),
        }
        if len({row["model"] for row in completed}) == 1 and len(found) > 2:
            rates, predicted, _, _ = (list(values) for values in zip(*found, strict=True))
            figures[way]["spearman"] = round(spearman(predicted, rates), 4)
    return figures


if __name__ == "__main__":
    main()
