"""Holds the memory and the time that the cost model predicts against published measurements.

Every run is traced on the meta device with the installed libraries, changed to what the measurement was made with
(`published/software.py`), and predicted as `autotune` does, without anything it has learned. Nothing is fitted to a row
or a model. Prints the errors by group and technique, the worst rows, what was said of fitting, and what was passed
over and why; then time, each source's intervals by the errors of the others (`published/intervals.py`). The last line
is one JSON object. Run it from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from provenance import ROOT, provenance, results_path
from published.intervals import report_time, time_figures
from published.kernels import SPARES_SINCE
from published.rows import NotPredicted, Row, load_rows
from published.scores import Fits, Prediction, Score
from published.setups import Setup, setup_of
from published.software import as_of, context_bytes
from published.speed import Timed, timed

from autotune.cost.communication import NCCL_BYTES
from autotune.cost.memory import components
from autotune.cost.profile import Profile
from autotune.cost.profiler import profile
from autotune.cost.reserve import Held, held_bytes
from autotune.cost.sharding import share_of
from autotune.errors import AutotuneError, InputError, one_line
from autotune.units import GIB
from autotune.values.hardware import detect

ROWS = Path(__file__).with_name("ground_truth.jsonl")

# What is aimed at: median and 90th percentile of the absolute error.
TARGETS = {
    "allocated, plain libraries": (0.03, 0.08),
    "allocated, kernels patched in": (0.05, 0.12),
    "allocated, several devices": (0.08, 0.20),
    "reserved, several devices": (0.08, 0.20),
    "device": (0.08, 0.20),
    "device, BERT-large": (0.08, 0.15),
}
FITS_TARGET = 0.9
_WITHOUT_AIM = ("allocated, other model code", "device, several devices")

_WORST_SHOWN = 12

# What a library raises at a model that isn't what the change expects; such a row is counted, with what was said.
_UNTRACED = (InputError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RuntimeError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Score the predictions; 0 if they could be made, 2 at bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=Path, default=ROWS, help="measurements, one JSON object a line")
    parser.add_argument("--whole", action="store_true", help="trace models whole, not extended from a few layers; slow")
    parser.add_argument("--no-save", action="store_true", help="write no results")
    options = parser.parse_args(arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        rows = load_rows(options.rows)
        started = time.monotonic()
        traced = tracer(whole=options.whole)
        predictions, skipped = predict_all(rows, traced)
        times = time_all(rows, traced)
    except AutotuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = {
        **figures_of(predictions, skipped),
        "time": time_figures(times),
        "rows": len(rows),
        "seconds": round(time.monotonic() - started, 1),
    }
    report(predictions, skipped)
    report_time(figures["time"])
    if not options.no_save:
        figures["saved"] = str(save(predictions, skipped, times, figures).relative_to(ROOT))
    print(json.dumps(figures))
    return 0


def predict_all(rows: Sequence[Row], traced: Callable[[Setup], Profile]) -> tuple[list[Prediction], Counter[str]]:
    """Return the predictions, and how many rows were passed over for which reason."""
    predictions: list[Prediction] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        try:
            predictions.append(predict(row, setup_of(row), traced))
        except NotPredicted as why:
            skipped[str(why)] += 1
        except _UNTRACED as error:
            skipped[f"can't be traced: {one_line(error)}"] += 1
    return predictions, skipped


def time_all(rows: Sequence[Row], traced: Callable[[Setup], Profile]) -> list[Timed]:
    """Return the steps whose time is stated and predicted."""
    found = []
    for row in rows:
        try:
            found.append(timed(row, traced))
        except (NotPredicted, *_UNTRACED):
            continue
    return found


def predict(row: Row, setup: Setup, traced: Callable[[Setup], Profile]) -> Prediction:
    """Return what is predicted of a row."""
    known = traced(setup)
    if setup.embeddings_in_8_bits:
        known = _without_tables(known)
    # Gradients that are never freed are there throughout, as between the micro-steps of an accumulated step.
    accumulation = max(setup.accumulation, 2 if setup.keeps_gradients else 1)
    share = share_of(known, setup.optim, setup.spread, accumulated=accumulation > 1)
    parts = components(known, setup.optim, setup.micro_batch, accumulation, share)
    held = _held(setup, known)
    spare = 0.0
    if setup.software.fast_loss and setup.software.transformers >= SPARES_SINCE:
        spared = replace(setup, software=replace(setup.software, spare_block=True))
        spare = _held(spared, traced(spared)).reserved - held.reserved
    context = context_bytes(setup.gpu, setup.software.torch)
    if setup.spread.parallelism.world_size > 1:
        context += NCCL_BYTES
    reserved = parts.allocated + held.unused + spare
    return Prediction(
        row=row,
        setup=setup,
        allocated=parts.allocated,
        reserved=reserved,
        least=parts.allocated + context,
        device=min(reserved + parts.paged + context, float(setup.gpu.memory_bytes)),
        moment=parts.moment,
        spare=spare,
    )


def _held(setup: Setup, known: Profile) -> Held:
    """Return what torch's allocator gives out and holds."""
    return held_bytes(
        known,
        setup.optim,
        setup.micro_batch,
        accumulated=setup.accumulation > 1,
        keeps_gradients=setup.keeps_gradients,
    )


def tracer(*, whole: bool) -> Callable[[Setup], Profile]:
    """Return a function that traces a setup, once for all whose trace is the same."""
    known: dict[str, Profile] = {}

    def traced(setup: Setup) -> Profile:
        key = repr((setup.spec.name, setup.family, setup.shape, setup.software))
        if key not in known:
            # A number of parameters that no extended trace comes to makes the profiler trace the model whole.
            count, change = -1 if whole else None, as_of(setup.software)
            known[key] = profile(setup.spec, setup.family, setup.shape, parameters=count, change=change)
        return known[key]

    return traced


def _without_tables(known: Profile) -> Profile:
    """Return a profile in which embeddings are weights like others."""
    groups = tuple(group.model_copy(update={"embedding": False}) for group in known.parameters)
    return known.model_copy(update={"parameters": groups})


def groups_of(predictions: Sequence[Prediction]) -> dict[str, list[float | None]]:
    """Return the errors of the groups that are aimed at, of rows all whose settings are known."""
    found: dict[str, list[float | None]] = {name: [] for name in (*TARGETS, *_WITHOUT_AIM)}
    for p in predictions:
        if p.row.tier != "A":
            continue
        if p.setup.spread.parallelism.world_size > 1:
            found["allocated, several devices"].append(p.error("allocated"))
            found["reserved, several devices"].append(p.error("reserved"))
            found["device, several devices"].append(p.error("device"))
            continue
        bert = p.row.group == "hf_docs_bert_large"
        names = {"plain": "plain libraries", "patched": "kernels patched in", "other": "other model code"}
        found[f"allocated, {names[p.setup.origin]}"].append(p.error("allocated"))
        if p.setup.origin != "other":
            found["device"].append(p.error("device"))
        if bert:
            found["device, BERT-large"].append(p.error("device"))
    return found


def figures_of(predictions: Sequence[Prediction], skipped: Counter[str]) -> dict[str, Any]:
    """Return the figures that the last line shows."""
    scores = {name: Score.of(errors) for name, errors in groups_of(predictions).items()}
    fits = Fits.of(predictions)
    met = {
        name: score is not None and score.median <= TARGETS[name][0] and _tail(name, score) <= TARGETS[name][1]
        for name, score in scores.items()
        if name in TARGETS
    }
    return {
        "predicted": len(predictions),
        "skipped": sum(skipped.values()),
        "scores": {name: score.as_json() for name, score in scores.items() if score is not None},
        "fits": {**vars(fits), "right": round(fits.share, 4)},
        "within_targets": {**met, "fits": fits.share >= FITS_TARGET},
    }


def _tail(name: str, score: Score) -> float:
    """Return what the second target is about: of the ten BERT-large readings, the worst."""
    return abs(score.worst) if name == "device, BERT-large" else score.p90


def report(predictions: Sequence[Prediction], skipped: Counter[str]) -> None:
    """Print the tables."""
    print(f"{'error of predicted over measured':62}   n  signed  median    p90   worst  aim")
    for name, errors in groups_of(predictions).items():
        _line(name, Score.of(errors), TARGETS.get(name))
    print("\nby source and technique")
    by: dict[str, list[Prediction]] = defaultdict(list)
    for p in predictions:
        devices = p.setup.spread.parallelism.world_size
        by[f"{p.row.group}: {p.setup.technique}{f' x {devices}' * (devices > 1)}"].append(p)
    for name, group in sorted(by.items()):
        _line(f"{name}, allocated", Score.of(p.error("allocated") for p in group))
        _line(f"{name}, reserved", Score.of(p.error("reserved") for p in group))
        _line(f"{name}, device", Score.of(p.error("device") for p in group))
    _report_worst(predictions)
    fits = Fits.of(predictions)
    print(f"\nfits: {fits.share:.1%} right       ran  ran out")
    print(f"  said to fit           {fits.fits_ran:5} {fits.fits_failed:8}")
    print(f"  said not to           {fits.short_ran:5} {fits.short_failed:8}")
    for p in predictions:
        if not p.right:
            need, has = p.least / GIB, p.setup.gpu.memory_gib
            print(
                f"  {_name(p)}: at least {need:.1f} of {has:.1f} GiB, {'ran' if p.row.ran else 'ran out'}; {p.reason}"
            )
    print("\npassed over")
    for why, count in skipped.most_common():
        print(f"{count:5} {why}")


def _report_worst(predictions: Sequence[Prediction]) -> None:
    for kind in ("allocated", "reserved", "device"):
        known = [(abs(e), e, p) for p in predictions if (e := p.error(kind)) is not None]
        print(f"\nworst rows, {kind}")
        for _, error, p in sorted(known, key=lambda item: -item[0])[:_WORST_SHOWN]:
            print(f"  {error:+7.1%} {_name(p)}; {p.reason}")


def _line(name: str, score: Score | None, target: tuple[float, float] | None = None) -> None:
    if score is None:
        return
    aim = f"  {target[0]:.0%}, {target[1]:.0%}" if target else ""
    shares = f"{score.signed_median:+7.1%} {score.median:6.1%} {score.p90:6.1%} {score.worst:+7.1%}"
    print(f"{name:62} {score.count:3} {shares}{aim}")


def _name(p: Prediction) -> str:
    return f"{p.row.id} {p.row.model}, {p.setup.technique}, {p.setup.micro_batch} x {p.setup.shape.length}"


def save(
    predictions: Sequence[Prediction], skipped: Counter[str], times: Sequence[Timed], figures: dict[str, Any]
) -> Path:
    """Write the results; return their path."""
    hardware = detect("cpu")
    path = results_path("predictor", hardware).with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "id": p.row.id,
            "technique": p.setup.technique,
            "origin": p.setup.origin,
            "allocated_gb": round(p.allocated / 1e9, 3),
            "measured_allocated_gb": p.row.allocated_bytes and round(p.row.allocated_bytes / 1e9, 3),
            "devices": p.setup.spread.parallelism.world_size,
            "reserved_gb": round(p.reserved / 1e9, 3),
            "spare_gb": round(p.spare / 1e9, 3),
            "measured_reserved_gb": p.row.reserved_bytes and round(p.row.reserved_bytes / 1e9, 3),
            "device_gb": round(p.device / 1e9, 3),
            "measured_device_gb": p.row.device_bytes and round(p.row.device_bytes / 1e9, 3),
            "fits": p.fits,
            "ran": p.row.ran,
            "peak": p.moment,
        }
        for p in predictions
    ]
    seconds = [{"id": t.row.id, "step_s": round(t.seconds, 4), "measured_s": round(t.measured, 4)} for t in times]
    content = {**provenance(hardware), "figures": figures, "skipped": dict(skipped), "predictions": rows}
    content["times"] = seconds
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
