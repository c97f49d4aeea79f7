"""The cost of training on a given number of tokens: FLOP, hours and money.

The prices of devices are read from a YAML or JSON file (`--prices`)::

    # prices.yaml: names as in `autotune gpus`, for one hour of one device
    currency: EUR
    a100-80gb: 1.80
    h100-sxm: 2.90

Evaluation, saving and restarts are not counted. Money counts all devices that train together.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import Field

from autotune.errors import InputError
from autotune.estimates.report import Predicted, RunCost
from autotune.space.file import read_yaml
from autotune.value import Value
from autotune.values.catalogue.gpus import gpu_named
from autotune.values.trial import Interval
from autotune.values.workload import Workload

PETAFLOP_S_DAY = 1e15 * 86_400

_HOUR_S = 3600.0


class Prices(Value):
    """Prices of an hour of one device, by its name in the table of GPUs."""

    currency: str
    per_hour: dict[str, float] = Field(description="above zero")


def read_prices(path: Path) -> Prices:
    """Return the prices in a YAML or JSON file.

    Raises:
        InputError: The file can't be read, names a GPU that the table lacks, or has a price that isn't above 0.
    """
    try:
        document = read_yaml(path)
    except InputError as error:
        raise InputError(f"--prices {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("currency"), str):
        raise InputError(f"--prices {path}: expected 'currency: EUR' (or another) and a price per hour by GPU")
    per_hour: dict[str, float] = {}
    for name, price in document.items():
        if name == "currency":
            continue
        try:
            gpu = gpu_named(str(name)).name
        except InputError as error:
            raise InputError(f"--prices {path}: {error}") from None
        if gpu in per_hour:
            raise InputError(f"--prices {path}: {name}: {gpu} has a price already")
        per_hour[gpu] = _price(path, str(name), price)
    return Prices(currency=document["currency"], per_hour=per_hour)


def run_cost(
    predicted: Predicted,
    *,
    tokens: float,
    workload: Workload,
    parameters: int,
    prices: Prices | None = None,
    gpu: str | None = None,
) -> RunCost:
    """Return the cost of training on `tokens`, source and target together, with a configuration on devices `gpu`."""
    tokens_per_step = workload.samples_per_step(predicted.config) * tokens_per_sample(workload)
    hours = interval = None
    speed = predicted.speed
    if speed is not None and speed.tokens_per_second is not None and speed.tokens_per_second_interval is not None:
        rates = speed.tokens_per_second_interval
        hours = tokens / speed.tokens_per_second / _HOUR_S
        interval = Interval(low=tokens / rates.high / _HOUR_S, high=tokens / rates.low / _HOUR_S)
    devices = predicted.config.parallelism.world_size
    price = prices.per_hour.get(gpu) if prices is not None and gpu is not None else None
    together = None if price is None else price * devices
    by_parameters = 6.0 * parameters * tokens
    needed = predicted.flops_per_step / tokens_per_step * tokens
    return RunCost(
        tokens=tokens,
        parameters=parameters,
        flops_by_parameters=by_parameters,
        petaflop_s_days_by_parameters=by_parameters / PETAFLOP_S_DAY,
        needed_flops=needed,
        needed_petaflop_s_days=needed / PETAFLOP_S_DAY,
        hours=hours,
        devices=devices,
        gpu_hours=None if hours is None else hours * devices,
        hours_interval=interval,
        price_per_hour=price,
        money=None if together is None or hours is None else together * hours,
        money_interval=None if together is None or interval is None else interval.times(together),
        currency=prices.currency if prices is not None else None,
    )


def tokens_per_sample(workload: Workload) -> float:
    """Return the tokens of a sample, source and target together."""
    if workload.tokens_per_sample is None:
        what = "sound, which has" if workload.task.takes_audio else "images, which have"
        raise InputError(f"--tokens: {workload.model.name} is trained on {what} none")
    return workload.tokens_per_sample


def _price(path: Path, name: str, price: Any) -> float:
    if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < math.inf:
        raise InputError(f"--prices {path}: {name}: expected a price per hour above 0, not {price!r}")
    return float(price)
