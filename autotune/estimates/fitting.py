"""Says what would make a model fit where nothing does; entered by the launcher like a trial.

What isn't traced yet is traced with torch, which the launcher has loaded and the search hasn't. No device is touched.
"""

from __future__ import annotations

from pathlib import Path

from autotune.cost.model import CostModel
from autotune.cost.profile import Profile
from autotune.estimates.forecast import Forecast
from autotune.estimates.profiles import Profiles
from autotune.estimates.report import Device
from autotune.planning.plan import SearchPlan
from autotune.storage.home import read_observations
from autotune.value import Value, read_value, write_value
from autotune.values.config import TrainConfig
from autotune.values.estimate import Rates

ENTRY = "autotune.estimates.fitting:run_fitting"


class FitRequest(Value):
    """A search in which nothing fits."""

    plan: SearchPlan
    rates: Rates
    profiles: tuple[Profile, ...]
    configs: tuple[TrainConfig, ...]


class FitAnswer(Value):
    """What comes nearest, and what would make it fit."""

    text: str


def run_fitting(directory: Path) -> None:
    """Answer the request in `directory`."""
    write_value(fitting(read_value(FitRequest, directory / "request.json")), directory / "answer.json")


def fitting(request: FitRequest) -> FitAnswer:
    """Return the answer, in this process, which comes to load torch."""
    plan, hardware = request.plan, request.plan.hardware
    observations = read_observations(hardware, plan.workload.model.model_type)
    model = CostModel.of(plan.workload, hardware, request.rates, request.profiles, observations)
    device = Device(name=hardware.name, hardware=hardware, memory_bytes=plan.memory_bytes, rates=request.rates.source)
    profiles = Profiles(plan.workload, plan.facts.parameters, known=model.profiles)
    forecast = Forecast(plan, device, model, profiles)
    configs = [config for config in request.configs if model.profile(config) is not None]
    return FitAnswer(text=str(forecast.nothing_fits(configs, plan.allowance, whole=False)))
