"""Searches on the stand-in's clock, where the truth is known: how good the answer is, and whether what it says holds.

    python benchmarks/twin.py [--problems gpt2 bert] [--ways autotune tpe] [--searches 4] [--max-time 9min] [--truths N]

Needs an environment with the stand-in (tests/fakecuda). Each search is a user's command line on a device with noise of
steps and processes, a cold start and drift; every second one has a larger or a further disturbance. Other `--ways` run
the same trials for as long and answer with the fastest: of legal configurations drawn at random or proposed by Optuna's
TPE, or of ever larger micro-batches until memory runs out, which DeepSpeed's autotuner tries on one device.

What is true of a configuration is its rate on the same device without any disturbance, in whole steps. The best is
sought among all that was tried, and then among the legal configurations that differ in one knob from the best so far
(of micro-batches the next sizes), up to `--truths` of a problem: it is the best that is known. Times are by the
stand-in's table and say nothing of a GPU; no process waits for them (`warp.cpp` there). Where the host is the slower
one, its real time counts, so that all true rates of a problem are measured anew, one after the other. Results are
written after each search, and what a stopped run has stored is gone on with; the last line is the figures as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from measured_searches import find, planned_search
from provenance import RESULTS, provenance
from searching.replay import suggested

from autotune.planning.plan import SearchPlan
from autotune.space.knobs import MICRO_BATCH
from autotune.storage.writer import TrialConverter
from autotune.value import write_text
from autotune.values.config import TrainConfig, knob_values
from autotune.values.hardware import detect
from autotune.values.problem import ignore
from autotune.values.trial import Purpose, TrialResult

A100 = {"FAKECUDA_NAME": "NVIDIA A100-SXM4-80GB", "FAKECUDA_MEMORY": "80GiB", "FAKECUDA_CC": "8.0"}
RTX_4090 = {"FAKECUDA_NAME": "NVIDIA GeForce RTX 4090", "FAKECUDA_MEMORY": "24GiB", "FAKECUDA_CC": "8.9"}
L4 = {"FAKECUDA_NAME": "NVIDIA L4", "FAKECUDA_MEMORY": "24GiB", "FAKECUDA_CC": "8.9"}

# The arguments of `autotune find`, and the device. Nothing is compiled, which takes minutes on two cores.
PROBLEMS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "gpt2": ({"model": "gpt2", "fix": ["compile=none"]}, RTX_4090),
    "bert": ({"model": "bert-large-uncased", "fix": ["compile=none"]}, L4),
    "vit": ({"model": "vit-base-patch16-224", "fix": ["compile=none"]}, L4),
    "t5-3b": ({"model": "t5-3b", "fix": ["compile=none"]}, A100),
    "llama-qlora": ({"model": "llama-3-8b", "fix": ["adapter=lora", "quantization=nf4", "compile=none"]}, RTX_4090),
    "qwen-lora": ({"model": "Qwen2.5-7B", "fix": ["adapter=lora", "compile=none"]}, A100),
}

# How many times as fast as this machine the host of the device is taken to be: an assumption.
HOST = 2

USUAL = {"noise": 0.002, "process": 0.002, "ramp": 0.1, "drift": 0.03}
FURTHER: tuple[dict[str, float], ...] = ({}, {"first": 0.01}, {}, {"cap": 0.1}, {}, {"noise": 0.02})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--searches", type=int, default=10, help="of each problem (default: %(default)s)")
    parser.add_argument("--max-time", default="40min", help="of a search (default: %(default)s)")
    parser.add_argument("--truths", type=int, default=40, help="most true rates of a problem (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=["autotune", *WAYS], default=["autotune"])
    parser.add_argument("--child", choices=PROBLEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        given = json.load(sys.stdin)
        if "tried" in given:
            true_rates(options.child, given, options.truths)
        else:
            tried_in_order(options.child, **given)
        return
    output = RESULTS / "twin.json"
    stored: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"problems": {}}
    for name in options.problems:
        kept = stored["problems"].setdefault(name, {"searches": [], "truth": []})
        for way, seed in itertools.product(options.ways, range(options.searches)):
            if sum(search["way"] == way for search in kept["searches"]) <= seed:
                origin = provenance(detect("cpu"))
                began = {"way": way, "date": origin["date"], "commit": origin["commit"]}
                kept["searches"].append({**began, **searched(name, way, seed, options.max_time)})
                print(f"{name}, {way} {seed}: {shown(kept['searches'][-1])}", file=sys.stderr, flush=True)
                write_text(json.dumps({**stored, **provenance(detect("cpu"))}, indent=1) + "\n", output)
        kept["truth"] = truth(name, kept, options.truths)
        kept["figures"] = {way: figures(kept, way) for way in dict.fromkeys(s["way"] for s in kept["searches"])}
        stored = {**stored, **provenance(detect("cpu"))}
        write_text(json.dumps(stored, indent=1) + "\n", output)
    print(json.dumps({name: stored["problems"][name]["figures"] for name in options.problems}))


def environment(device: dict[str, str], clock: str, scratch: str) -> dict[str, str]:
    home, state = str(Path(scratch) / "home"), str(Path(scratch) / "device")
    warp = Path(sysconfig.get_path("purelib"), "torch", "lib", "libfakecuda-warp.so")
    passing = {"FAKECUDA_CLOCK": clock, "FAKECUDA_HOST": str(HOST), "LD_PRELOAD": str(warp)}
    return {**os.environ, **device, **passing, "FAKECUDA_STATE": state, "AUTOTUNE_HOME": home}


def child(name: str, clock: str, given: dict[str, Any], *arguments: str) -> Any:
    """Return the last line, as JSON, that this program prints in a process on the device of a problem."""
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [sys.executable, __file__, "--child", name, *arguments],
            env=environment(PROBLEMS[name][1], clock, scratch),
            input=json.dumps(given),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def searched(name: str, way: str, seed: int, max_time: str) -> dict[str, Any]:
    """Return what a search told, and which configurations it tried in which order."""
    words, device = PROBLEMS[name]
    clock = ",".join(f"{k}={v}" for k, v in {**USUAL, **FURTHER[seed % len(FURTHER)], "seed": seed}.items())
    if way != "autotune":
        return {"clock": clock, **child(name, clock, {"way": way, "seed": seed, "max_time": max_time})}
    options = [f"--{key}={v}" for key, value in words.items() for v in (value if isinstance(value, list) else [value])]
    with tempfile.TemporaryDirectory() as scratch:
        own = environment(device, clock, scratch)
        told, result = find([*options, "--max-time", max_time], Path(scratch), own)
    if result is None:
        return {"clock": clock, **told}
    tried = [row.config.model_dump(mode="json") for row in result.trials if row.purpose in ("baseline", "search")]
    return {"clock": clock, **told, "config": result.best.config.model_dump(mode="json"), "tried": tried}


def shown(search: dict[str, Any]) -> str:
    ratio = search.get("speedup") and f"{search['speedup']['ratio']:.3f}"
    verdict = search.get("verdict", search.get("error"))
    return f"{verdict}, {ratio}, {search.get('trials')} trials, {search.get('search_time_s')} s"


def truth(name: str, kept: dict[str, Any], most: int) -> list[dict[str, Any]]:
    """Return the true rates of configurations, the fastest first."""
    ended = [search for search in kept["searches"] if "config" in search]
    answers = [config for search in ended for config in (search["tried"][0], search["config"])]
    tried = [*answers, *(config for search in ended for config in search["tried"])]
    found: list[dict[str, Any]] = child(name, "1", {"tried": tried}, "--truths", str(most))
    return found


def tried_in_order(name: str, way: str, seed: int, max_time: str) -> None:
    """Print the configurations that another way to search tried until its time was over, and the fastest of them."""
    results: dict[TrainConfig, TrialResult] = {}
    options = {**PROBLEMS[name][0], "device": "cuda", "max_time": max_time}
    with planned_search(options, ignore) as (plan, backend, _, watch), contextlib.suppress(StopIteration):
        asking = WAYS[way](plan, seed)
        config = next(asking)
        while (left_s := plan.budget.max_time_s - watch.elapsed_s()) > 0:
            if config not in results:
                timeout_s = min(plan.budget.trial_timeout_s, left_s)
                request = plan.request_of(config, Purpose.SEARCH, number=len(results), timeout_s=timeout_s)
                results[config] = backend.pool.run(request)
            config = asking.send(results[config])
    tried = [config.model_dump(mode="json") for config in results]
    measured = {config: m.samples_per_second for config, result in results.items() if (m := result.measurement)}
    answer = max(measured, key=lambda config: measured[config], default=None)
    found = {"search_time_s": round(watch.elapsed_s(), 1), "trials": len(results), "tried": tried}
    print(json.dumps(found if answer is None else {**found, "config": answer.model_dump(mode="json")}))


# Yields a configuration and is sent its result.
Asking = Generator[TrainConfig, TrialResult]


def at_random(plan: SearchPlan, seed: int) -> Asking:
    legal = plan.search_space.legal
    for config in (plan.baseline, *random.Random(seed).sample(legal, len(legal))):
        _ = yield config


def by_tpe(plan: SearchPlan, seed: int) -> Asking:
    space, converter = plan.search_space, TrialConverter(plan)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.enqueue_trial(space.choices_of(plan.baseline))
    while True:
        trial = study.ask()
        config = suggested(space, trial)
        if config != plan.baseline and space.refusal(config) is not None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        frozen = converter.frozen((yield config))
        for name, value in frozen.constraints.items():
            trial.set_constraint(name, value)
        study.tell(trial, frozen.value or 0.0)  # one that failed trains nothing


def by_micro_batch(plan: SearchPlan, seed: int) -> Asking:
    sizes = next(d.choices for d in plan.search_space.dimensions if d.name == MICRO_BATCH)
    own = plan.baseline.per_device_train_batch_size
    for size in sorted({max(own, int(size or own)) for size in sizes}):
        result = yield plan.baseline.model_copy(update={MICRO_BATCH: size})
        if size > own and result.measurement is None:
            return


WAYS: dict[str, Callable[[SearchPlan, int], Asking]] = {
    "random": at_random,
    "tpe": by_tpe,
    "micro-batch": by_micro_batch,
}


def true_rates(name: str, given: dict[str, Any], most: int) -> None:
    """Print the true rates of what was tried and of neighbours of the best, in samples/s; 0: it failed."""
    with planned_search({**PROBLEMS[name][0], "device": "cuda", "max_time": "10h"}, ignore) as (plan, backend, *_):
        rates: dict[TrainConfig, float] = {}
        waiting = [plan.baseline, *(TrainConfig(**config) for config in given["tried"])]
        every = plan.every_config()
        while len(rates) < most and (left := [config for config in waiting if config not in rates]):
            request = plan.request_of(left[0], Purpose.SEARCH, number=len(rates), timeout_s=600.0)
            steps = {"discarded_steps": 2, "discarded_s": 0.0, "measure_steps": 4, "measure_time_s": 60.0}
            limits = request.limits.model_copy(update={**steps, "relative_interval": 1e-9})
            whole = {"limits": limits, "accumulation_steps": plan.workload.accumulation_steps(left[0])}
            measured = backend.pool.run(request.model_copy(update=whole)).measurement
            rates[left[0]] = measured.samples_per_second if measured else 0.0
            print(f"{name}: {rates[left[0]]:.4g} samples/s, {len(left) - 1} left", file=sys.stderr, flush=True)
            if len(left) == 1:
                waiting = list(neighbours(max(rates, key=lambda config: rates[config]), every, plan))
    ranked = sorted(rates.items(), key=lambda item: -item[1])
    print(json.dumps([{"config": config.model_dump(mode="json"), "rate": rate} for config, rate in ranked]))


def neighbours(best: TrainConfig, every: list[TrainConfig], plan: SearchPlan) -> Iterator[TrainConfig]:
    """Yield the configurations that differ from `best` in one knob, and load data as it does."""
    own = best.per_device_train_batch_size
    sizes = sorted({config.per_device_train_batch_size for config in every})
    near = sizes[max(0, sizes.index(own) - 1) : sizes.index(own) + 2]
    for config in every:
        differing = [a != b for a, b in zip(knob_values(config), knob_values(best), strict=True)]
        loads_alike = config.dataloader_num_workers == best.dataloader_num_workers
        if sum(differing) == 1 and config.per_device_train_batch_size in near and loads_alike:
            yield config


def figures(kept: dict[str, Any], way: str) -> dict[str, Any]:
    """Return how the answers of a problem's searches compare with the truth."""
    searches = [search for search in kept["searches"] if search["way"] == way]
    key = partial(json.dumps, sort_keys=True)
    rates = {key(row["config"]): row["rate"] for row in kept["truth"]}

    def rate(config: dict[str, Any]) -> float:
        return float(rates[key(config)])

    ended = [
        {**search, "rate": rate(search["config"]), "base": rate(search["tried"][0])}
        for search in searches
        if "config" in search and {key(search["config"]), key(search["tried"][0])} <= rates.keys()
    ]
    best = max(rates.values())
    shares = [search["rate"] / best for search in ended]
    held = [
        search["speedup"]["interval"]["low"] <= search["rate"] / search["base"] <= search["speedup"]["interval"]["high"]
        for search in ended
        if search.get("speedup") and search["base"]
    ]
    places = [search["tried"].index(search["config"]) + 1 for search in ended if search["config"] in search["tried"]]
    spent = [(search["spent"], search["trials"]) for search in ended if search.get("spent")]
    names = spent[0][0] if spent else ()  # of the parts of a search's time: see `values.time_spent`
    walls = [sum(parts.values()) for parts, _ in spent] or [search["search_time_s"] for search in ended]

    def middle(values: Sequence[float]) -> float | None:
        return round(statistics.median(values), 3) if values else None

    return {
        "searches": len(searches),
        "ended": len(ended),
        "true_rates": len(rates),
        "within_1_percent": sum(share >= 0.99 for share in shares),
        "within_3_percent": sum(share >= 0.97 for share in shares),
        "worst_share_of_best": round(min(shares, default=0.0), 4),
        "slower_than_baseline": sum(search["rate"] < search["base"] for search in ended),
        "intervals": len(held),
        "intervals_hold": sum(held),
        "trials_to_answer": middle(places),
        "wall_s": middle(walls),
        "shares": {name: middle([parts[name] / sum(parts.values()) for parts, _ in spent]) for name in names},
        "seconds_a_trial": {name: middle([parts[name] / trials for parts, trials in spent]) for name in names},
    }


if __name__ == "__main__":
    main()
