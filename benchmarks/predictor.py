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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from provenance import ROOT, provenance, results_path
from published.intervals import Timed, report_time, time_figures, timed
from published.kernels import SPARES_SINCE
from published.rows import NotPredicted, Row, load_rows
from published.setups import Setup, setup_of
from published.software import as_of, context_bytes

from autotune.cost.memory import components
from autotune.cost.profile import Profile
from autotune.cost.profiler import profile
from autotune.cost.reserve import Held, held_bytes
from autotune.cost.sharding import NCCL_BYTES, share_of
from autotune.errors import AutotuneError, InputError, one_line
from autotune.units import GIB
from autotune.values.hardware import detect

ROWS = Path(__file__).with_name("ground_truth.jsonl")

# What is aimed at: median and 90th percentile of the absolute error; of the ten BERT-large readings, the worst.
TARGETS = {
    "allocated, plain libraries": (0.03, 0.08),
    "allocated, kernels patched in": (0.05, 0.12),
    "allocated, several devices": (0.08, 0.20),
    "reserved, several devices": (0.08, 0.20),
    "device": (0.08, 0.20),
    "device, BERT-large": (0.08, 0.15),
}
FITS_TARGET = 0.9
_KINDS = ("allocated", "reserved", "device")
_WITHOUT_AIM = ("allocated, other model code", "device, several devices")
_ORIGINS = {"plain": "plain libraries", "patched": "kernels patched in", "other": "other model code"}
_WORST_SHOWN = 12

# What a library raises at a model that isn't what the change expects; such a row is counted, with what was said.
_UNTRACED = (InputError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RuntimeError)

Tracer = Callable[[Setup], Profile]


class Prediction(NamedTuple):
    """What is predicted of a row, in bytes."""

    row: Row
    setup: Setup
    allocated: float
    reserved: float  # what the allocator would reserve if the device had no end
    least: float  # what the device has to hold: near its capacity the allocator gives unused blocks back
    device: float  # what the driver would show
    moment: str  # the operator at the allocated peak
    spare: float  # what of the reserved memory is a whole block that can be given back (`SparingCrossEntropy`)

    @property
    def fits(self) -> bool:
        return self.least <= self.setup.gpu.memory_bytes

    @property
    def right(self) -> bool:
        """Whether what is said of fitting is what happened."""
        return self.fits == self.row.ran

    @property
    def name(self) -> str:
        setup = self.setup
        shown = f"{self.row.id} {self.row.model}, {setup.technique}, {setup.micro_batch} x {setup.shape.length}"
        return f"{shown}; {self._reason()}"

    def _reason(self) -> str:
        """Say why it is off, as far as is known: by what was run, never by the row. See docs/how-it-works.md."""
        capacity = self.setup.gpu.memory_bytes
        if self.setup.origin == "other":
            return "other model code: the library's model of the same figures stands for it"
        if not self.right:
            near = self.least > 0.9 * capacity
            return "free memory lies in blocks too small" if near else "software and settings only partly stated"
        if self.setup.devices > 1:
            return "sharded: of the allocator one stream is replayed, and blocks of the others can't be used by it"
        if self.reserved > 0.97 * capacity:
            return "near the device's capacity: when the allocator gives blocks back decides"
        return "not explained"

    def error(self, kind: str) -> float | None:
        """Return predicted over measured, less 1, of one of `_KINDS` of memory."""
        measured = getattr(self.row, f"{kind}_bytes")
        return getattr(self, kind) / measured - 1 if measured and self.row.ran else None


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
        predictions, times, skipped = predict_all(rows, tracer(whole=options.whole))
    except AutotuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    scores = {name: score(errors) for name, errors in groups_of(predictions).items()}
    figures = {
        **figures_of(predictions, scores, skipped),
        "time": time_figures(times),
        "rows": len(rows),
        "seconds": round(time.monotonic() - started, 1),
    }
    report(predictions, scores, figures["fits"], skipped)
    report_time(figures["time"])
    if not options.no_save:
        figures["saved"] = str(save(predictions, skipped, times, figures).relative_to(ROOT))
    print(json.dumps(figures))
    return 0


def predict_all(rows: Sequence[Row], traced: Tracer) -> tuple[list[Prediction], list[Timed], Counter[str]]:
    """Return the predictions of memory and of time, and how many rows had no memory predicted for which reason."""
    predictions, times, skipped = list[Prediction](), list[Timed](), Counter[str]()
    for row in rows:
        try:
            predictions.append(predict(row, setup_of(row), traced))
        except NotPredicted as why:
            skipped[str(why)] += 1
        except _UNTRACED as error:
            skipped[f"can't be traced: {one_line(error)}"] += 1
        try:
            times.append(timed(row, traced))
        except (NotPredicted, *_UNTRACED):
            continue
    return predictions, times, skipped


def predict(row: Row, setup: Setup, traced: Tracer) -> Prediction:
    known = traced(setup)
    if setup.embeddings_in_8_bits:
        groups = tuple(group.model_copy(update={"embedding": False}) for group in known.parameters)
        known = known.model_copy(update={"parameters": groups})
    # Gradients that are never freed are there throughout, as between the micro-steps of an accumulated step.
    accumulation = max(setup.accumulation, 2 if setup.keeps_gradients else 1)
    share = share_of(known, setup.optim, setup.spread, accumulated=accumulation > 1)
    parts = components(known, share, setup.micro_batch, accumulation)
    held = _held(setup, known)
    spare = 0.0
    if setup.software.fast_loss and setup.software.transformers >= SPARES_SINCE:
        spared = replace(setup, software=replace(setup.software, spare_block=True))
        spare = _held(spared, traced(spared)).reserved - held.reserved
    context = context_bytes(setup.gpu, setup.software.torch) + (NCCL_BYTES if setup.devices > 1 else 0)
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
    several, kept = setup.accumulation > 1, setup.keeps_gradients
    return held_bytes(known, setup.optim, setup.micro_batch, accumulated=several, keeps_gradients=kept)


def tracer(*, whole: bool) -> Tracer:
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


def groups_of(predictions: Sequence[Prediction]) -> dict[str, list[float | None]]:
    """Return the errors of the groups that are aimed at, of rows all whose settings are known."""
    found: dict[str, list[float | None]] = {name: [] for name in (*TARGETS, *_WITHOUT_AIM)}
    for p in (p for p in predictions if p.row.tier == "A"):
        if p.setup.devices > 1:
            for kind in _KINDS:
                found[f"{kind}, several devices"].append(p.error(kind))
            continue
        found[f"allocated, {_ORIGINS[p.setup.origin]}"].append(p.error("allocated"))
        if p.setup.origin != "other":
            found["device"].append(p.error("device"))
        if p.row.group == "hf_docs_bert_large":
            found["device, BERT-large"].append(p.error("device"))
    return found


def score(errors: Iterable[float | None]) -> dict[str, Any] | None:
    """Return the errors of a group as shares of what was measured; None if there are none."""
    known = np.array([e for e in errors if e is not None])
    if not len(known):
        return None
    size = np.abs(known)
    shares = {
        "signed_median": np.median(known),
        "median": np.median(size),
        "p90": np.percentile(size, 90),
        "worst": known[np.argmax(size)],
    }
    return {"count": len(known), **{name: round(float(share), 4) for name, share in shares.items()}}


def figures_of(
    predictions: Sequence[Prediction], scores: dict[str, dict[str, Any] | None], skipped: Counter[str]
) -> dict[str, Any]:
    """Return the figures that the last line shows."""
    counts = Counter((p.fits, p.row.ran) for p in predictions)
    fits = {
        "fits_ran": counts[True, True],
        "fits_failed": counts[True, False],
        "short_ran": counts[False, True],
        "short_failed": counts[False, False],
    }
    right = (fits["fits_ran"] + fits["short_failed"]) / len(predictions) if predictions else float("nan")
    met = {}
    for name, (median, tail) in TARGETS.items():
        found = scores[name]
        reached = found and (abs(found["worst"]) if name == "device, BERT-large" else found["p90"])
        met[name] = found is not None and found["median"] <= median and reached <= tail
    return {
        "predicted": len(predictions),
        "skipped": sum(skipped.values()),
        "scores": {name: found for name, found in scores.items() if found is not None},
        "fits": {**fits, "right": round(right, 4)},
        "within_targets": {**met, "fits": right >= FITS_TARGET},
    }


def report(
    predictions: Sequence[Prediction],
    scores: dict[str, dict[str, Any] | None],
    fits: dict[str, Any],
    skipped: Counter[str],
) -> None:
    """Print the tables."""
    print(f"{'error of predicted over measured':62}   n  signed  median    p90   worst  aim")
    for name, found in scores.items():
        _line(name, found, TARGETS.get(name))
    print("\nby source and technique")
    by: dict[str, list[Prediction]] = defaultdict(list)
    for p in predictions:
        by[f"{p.row.group}: {p.setup.technique}{f' x {p.setup.devices}' * (p.setup.devices > 1)}"].append(p)
    for name, group in sorted(by.items()):
        for kind in _KINDS:
            _line(f"{name}, {kind}", score(p.error(kind) for p in group))
    for kind in _KINDS:
        print(f"\nworst rows, {kind}")
        known = [(e, p) for p in predictions if (e := p.error(kind)) is not None]
        for error, p in sorted(known, key=lambda item: -abs(item[0]))[:_WORST_SHOWN]:
            print(f"  {error:+7.1%} {p.name}")
    print(f"\nfits: {fits['right']:.1%} right       ran  ran out")
    print(f"  said to fit           {fits['fits_ran']:5} {fits['fits_failed']:8}")
    print(f"  said not to           {fits['short_ran']:5} {fits['short_failed']:8}")
    for p in predictions:
        if not p.right:
            need, has = p.least / GIB, p.setup.gpu.memory_gib
            print(f"  at least {need:.1f} of {has:.1f} GiB, {'ran' if p.row.ran else 'ran out'}: {p.name}")
    print("\npassed over")
    for why, count in skipped.most_common():
        print(f"{count:5} {why}")


def _line(name: str, found: dict[str, Any] | None, target: tuple[float, float] | None = None) -> None:
    if found is not None:
        aim = f"  {target[0]:.0%}, {target[1]:.0%}" if target else ""
        shares = f"{found['signed_median']:+7.1%} {found['median']:6.1%} {found['p90']:6.1%} {found['worst']:+7.1%}"
        print(f"{name:62} {found['count']:3} {shares}{aim}")


def save(
    predictions: Sequence[Prediction], skipped: Counter[str], times: Sequence[Timed], figures: dict[str, Any]
) -> Path:
    """Write the results; return their path."""
    hardware = detect("cpu")
    path = results_path("predictor.json", hardware)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for p in predictions:
        row = {"id": p.row.id, "technique": p.setup.technique, "origin": p.setup.origin, "devices": p.setup.devices}
        for kind in _KINDS:
            measured = getattr(p.row, f"{kind}_bytes")
            row |= {f"{kind}_gb": round(getattr(p, kind) / 1e9, 3)}
            row |= {f"measured_{kind}_gb": measured and round(measured / 1e9, 3)}
        rows.append({**row, "spare_gb": round(p.spare / 1e9, 3), "fits": p.fits, "ran": p.row.ran, "peak": p.moment})
    seconds = [{"id": t.row.id, "step_s": round(t.seconds, 4), "measured_s": round(t.measured, 4)} for t in times]
    content = {**provenance(hardware), "figures": figures, "skipped": dict(skipped), "predictions": rows}
    path.write_text(json.dumps({**content, "times": seconds}, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
