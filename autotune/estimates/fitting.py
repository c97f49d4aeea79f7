"""Finds the changes that make a model fit where a configuration doesn't, or none does.

A search asks a child of the launcher, which has loaded torch: it traces families that lack one, and touches no device.
"""

import dataclasses
import itertools
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autotune.cost.memory import framework_bytes
from autotune.cost.model import CostModel
from autotune.cost.profile import Profile
from autotune.errors import NothingFitsError
from autotune.estimates.forecast import Forecast, Profiles, with_micro_batches
from autotune.estimates.report import Device
from autotune.planning.plan import SearchPlan
from autotune.space.knobs import MICRO_BATCH, allowance_of, changes, differing, in_words, make_point, shown_changes
from autotune.storage.home import read_observations
from autotune.units import show_memory
from autotune.value import Value, read_value, write_text
from autotune.values.budget import Effort
from autotune.values.catalogue import gpus
from autotune.values.config import Allowance, Scalar, TrainConfig
from autotune.values.estimate import Rates

ENTRY = "autotune.estimates.fitting:run_fitting"
ANSWER_FILE = "answer.txt"
SMALLER_EVALUATION = "the peak is that of the evaluation: a smaller --eval-batch, or fewer --eval-samples, take less"


class FitRequest(Value):
    """A search in which nothing fits."""

    plan: SearchPlan
    rates: Rates
    profiles: tuple[Profile, ...]
    configs: tuple[TrainConfig, ...]


def run_fitting(directory: Path) -> None:
    """Write the nearest configuration and changes that make it fit, in words, in a process that comes to load torch."""
    request = read_value(FitRequest, directory / "request.json")
    plan, hardware = request.plan, request.plan.hardware
    observations = read_observations(hardware, plan.workload.model.model_type)
    model = CostModel.of(plan.workload, hardware, request.rates, request.profiles, observations, plan.facts.experts)
    device = Device(name=hardware.name, hardware=hardware, memory_bytes=plan.memory_bytes, rates=request.rates.source)
    profiles = Profiles(plan.workload, plan.facts.parameters, known=model.profiles)
    forecast = Forecast(plan, device, dataclasses.replace(model, profiles=profiles))
    configs = [config for config in request.configs if model.profile(config) is not None]
    write_text(str(nothing_fits(forecast, configs, plan.allowance, whole=False)), directory / ANSWER_FILE)


def nothing_fits(
    forecast: Forecast, configs: Sequence[TrainConfig], allowance: Allowance, *, whole: bool = True
) -> NothingFitsError:
    """Return an error that names the tightest configuration, the memory it takes, and changes that make it fit."""
    config = forecast.tightest(configs)
    found, nearest = forecast.predicted(config), shown_changes(changes(config, forecast.plan))
    remedy = SMALLER_EVALUATION if found.memory.phase == "evaluation" else would_fit(forecast, config, allowance, whole)
    return NothingFitsError(f"nothing fits: {nearest} comes nearest and {found.miss(forecast.device)}; {remedy}")


def would_fit(
    forecast: Forecast, config: TrainConfig, allowance: Allowance, whole: bool = True, given: Container[str] = ()
) -> str:
    """Return a clause that names the changes with which a configuration fits, and the device that it fits as it is.

    Its `--fix` says the `whole` configuration, as an estimate needs it, or the changes alone. One change is preferred:
    that of the smallest allowance class, then the fastest; else several, allowed ones if they are enough, others with
    the `--allow` that they need. A whole configuration has the fastest micro-batch, unless the user has `given` one.
    """
    device, ways = larger_device(forecast, config), _Ways(forecast, config)
    chosen = ways.alone() or ways.together(allowance) or ways.together(Allowance.METHOD)
    changed = ways.changed(chosen) if chosen else None
    if not chosen or changed is None:
        return f"no change that was tried makes it fit; {device}"
    if whole and MICRO_BATCH not in given:
        chosen = ways.resized(chosen)
        changed = ways.changed(chosen) or changed
    depth = allowance_of(changed, forecast.plan.model_copy(update={"baseline": config}))
    ranks = " ranks such changes" if whole and "quantization" not in chosen else ""
    allowing = "" if allowance.admits(depth) else f" (--allow {depth}{ranks})"
    fixed = {**(differing(config, forecast.plan.baseline) if whole else {}), **chosen}
    fix, found = ",".join(in_words(*change) for change in fixed.items()), forecast.predicted(changed)
    takes, fits = show_memory(found.memory.device_peak_bytes), "fits" if found.fits == "yes" else "probably fits"
    return f"with --fix {fix}{allowing} it takes {takes}, which {fits}; as it is, {device}"


def larger_device(forecast: Forecast, config: TrainConfig) -> str:
    """Return words on what has the memory that a configuration takes: the whole GPU, or the smallest of the table."""
    needed, plan = round(forecast.predicted(config).memory.device_interval.high), forecast.plan
    if plan.memory_bytes < needed <= plan.hardware.memory_bytes and not plan.hardware.is_cpu:
        return f"it fits {forecast.device.name} with all of its {show_memory(plan.hardware.memory_bytes)}"
    needed += plan.hardware.is_cpu * round(framework_bytes(gpus()[0].hardware())[0])  # a CUDA context takes a part
    for gpu in sorted((gpu for gpu in gpus() if gpu.memory_bytes >= needed), key=lambda gpu: gpu.memory_bytes):
        there = gpu.hardware()
        hardware = there.model_copy(update={"versions": {**there.versions, **plan.hardware.versions}})
        if plan.model_copy(update={"hardware": hardware}).refusal(config) is None:
            return f"it fits {gpu.name} (estimate --gpu) with its {show_memory(gpu.memory_bytes)}"
    return f"it takes {show_memory(needed)}, and no GPU that can run it has that much (--devices N: several share it)"


class _Change(NamedTuple):
    config: TrainConfig
    knob: str
    choice: Scalar
    depth: Allowance


class _Ways:
    """Changes of a configuration that doesn't fit; one whose weights and states alone don't isn't traced."""

    def __init__(self, forecast: Forecast, config: TrainConfig) -> None:
        self._forecast = forecast
        self._config = config
        thorough = forecast.plan.budget.model_copy(update={"effort": Effort.THOROUGH})  # with what is tried last
        self._space = forecast.plan.model_copy(update={"allowance": Allowance.METHOD, "budget": thorough}).search_space
        problem = forecast.plan.model_copy(update={"baseline": config})
        found = [
            _Change(changed, dimension.name, choice, allowance_of(changed, problem))
            for dimension in self._space.dimensions
            for choice in dimension.choices
            if (changed := self.changed({dimension.name: choice})) is not None and changed != config
        ]
        self._changes = sorted(found, key=lambda change: change.depth.rank)  # the smallest allowance class first

    def changed(self, choices: Mapping[str, Scalar]) -> TrainConfig | None:
        """Return the configuration with other knobs; None if that is refused."""
        changed = self._space.config({**make_point(self._config), **choices})
        return None if self._space.refusal(changed) else changed

    def alone(self) -> dict[str, Scalar] | None:
        """Return the fastest change of the smallest class that fits."""
        possible = [change for change in self._changes if not self._forecast.plan.too_large(change.config)]
        for _, group in itertools.groupby(possible, key=lambda change: change.depth):
            members = list(group)
            for change in (members[row] for row in self._fastest([change.config for change in members])):
                if self._forecast.fits(change.config):
                    return {change.knob: change.choice}
        return None

    def together(self, admitted: Allowance) -> dict[str, Scalar] | None:
        """Return changes that fit together, and none of which can be left out; None if all together don't fit.

        Of each knob the lightest choice is taken, those that save most first: by weights, gradients and states, which
        need no trace, and then by the whole, the loss in chunks after them. As only an adapter can be trained on
        weights in 4 bits, these come last, or earlier where nothing fits otherwise.
        """
        plan, changes = self._forecast.plan, [change for change in self._changes if admitted.admits(change.depth)]
        chunks: dict[str, Scalar] = {"chunked_loss": True} if admitted.admits(Allowance.NUMERICS) else {}
        packed: dict[str, Scalar] = {"quantization": "nf4"} if admitted is Allowance.METHOD else {}
        states = [plan.least_states(change.config) for change in changes]
        chosen, fits = self._widened({}, _lightest(changes, states, plan.least_states(self._config)))
        if not fits and self._is_too_large(chosen):
            chosen, fits = self._widened(chosen, packed)
            if self._is_too_large(chosen):
                return None
        if not fits:
            configs = [self._config, *(change.config for change in changes)]
            least = self._forecast.model.predict(configs).least_bytes.tolist()
            chosen, fits = self._widened(chosen, {**_lightest(changes, least[1:], least[0]), **chunks, **packed})
        if not fits:
            return None
        for knob in list(chosen):
            fewer = {name: choice for name, choice in chosen.items() if name != knob}
            chosen = fewer if self._fits_with(fewer) else chosen
        return chosen

    def resized(self, chosen: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return the chosen changes with the fastest micro-batch that surely fits, if they have none yet."""
        changed = None if MICRO_BATCH in chosen else self.changed(chosen)
        configs = [] if changed is None else with_micro_batches(changed, self._forecast.plan.workload)
        for row in self._fastest(configs):
            if self._forecast.predicted(configs[row]).fits == "yes":
                return {**chosen, MICRO_BATCH: configs[row].per_device_train_batch_size}
        return chosen

    def _fastest(self, configs: Sequence[TrainConfig]) -> list[int]:
        """Return the positions of those that may fit, the fastest first, without those that can't be traced."""
        found = self._forecast.model.predict(configs)
        order: list[int] = np.argsort(-found.samples_per_second, kind="stable").tolist()
        return [row for row in order if found.least_bytes[row] <= self._forecast.device.memory_bytes]

    def _widened(self, chosen: dict[str, Scalar], choices: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], bool]:
        """Return the chosen changes and one choice after the other until all fit together, and whether they do."""
        for knob, choice in choices.items():
            wider = {**chosen, knob: choice}
            if knob not in chosen and self.changed(wider) is not None:
                chosen = wider
                if self._fits_with(chosen):
                    return chosen, True
        return chosen, False

    def _is_too_large(self, choices: Mapping[str, Scalar]) -> bool:
        changed = self.changed(choices)
        return changed is not None and self._forecast.plan.too_large(changed) is not None

    def _fits_with(self, choices: Mapping[str, Scalar]) -> bool:
        changed = self.changed(choices)
        if changed is None or self._is_too_large(choices):
            return False
        return self._forecast.model.profile(changed) is not None and self._forecast.fits(changed)


def _lightest(changes: Sequence[_Change], taken: Sequence[float], before: float) -> dict[str, Scalar]:
    """Return the lightest choice of each knob that takes fewer bytes than `before`, those that save most first."""
    lighter = [(nbytes, change) for nbytes, change in zip(taken, changes, strict=True) if nbytes < before]
    found: dict[str, Scalar] = {}
    for _, change in sorted(lighter, key=lambda pair: pair[0]):
        found.setdefault(change.knob, change.choice)
    return found
