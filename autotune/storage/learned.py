"""What was learned of a device, for the next search: its measured rates, and how far predictions were off.

Rates hold for a device with its drivers, libraries and cores, and are found by the hardware's fingerprint; so are
observations, by type of model as well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from autotune.cost.calibrate import beyond_data_sheet, rates_by_table
from autotune.cost.corrections import Observation
from autotune.errors import InputError
from autotune.storage.home import home, writable
from autotune.value import Value, read_value, write_value
from autotune.values.estimate import Rates
from autotune.values.hardware import Hardware

logger = logging.getLogger(__name__)

# The latest observations; a regression over them takes milliseconds.
_MOST_OBSERVATIONS = 300


class Observations(Value):
    """Of one device and one type of model."""

    schema_version: Literal[2] = Field(description="1: with peaks on CPUs that counted freed blocks")
    observations: tuple[Observation, ...] = ()


def rates_of(hardware: Hardware) -> Rates:
    """Return the rates of a device: the measured ones if any are kept, otherwise those of the table.

    Raises:
        MachineError: Nothing is kept, and no data sheet of this GPU is known.
    """
    return read_rates(hardware) or rates_by_table(hardware)


def rates_path(hardware: Hardware) -> Path:
    """Return the file that holds the measured rates of a device, if there are any.

    Raises:
        InputError: As :func:`autotune.storage.home.home`.
    """
    return home() / "rates" / f"{hardware.fingerprint}.json"


def write_rates(rates: Rates, hardware: Hardware) -> Path:
    """Keep the measured rates of a device and return the file.

    Raises:
        InputError: The home can't be written.
    """
    path = writable("rates") / rates_path(hardware).name
    try:
        write_value(rates, path)
    except OSError as error:
        raise InputError(f"{path}: can't be written: {error.strerror}") from None
    return path


def read_rates(hardware: Hardware) -> Rates | None:
    """Return the measured rates of a device; None if none are kept. A file that can't be read is ignored, and said."""
    try:
        path = rates_path(hardware)
        rates = read_value(Rates, path)
    except (FileNotFoundError, NotADirectoryError, InputError):
        return None
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't what autotune writes"
    else:
        too_much = beyond_data_sheet(rates, hardware)
        if too_much is None:
            return rates
        reason = f"it has {too_much}"
    logger.warning("autotune: %s is ignored: %s; autotune doctor --calibrate makes it anew", path, reason)
    return None


def _observations_path(hardware: Hardware, model_type: str) -> Path:
    return home() / "corrections" / hardware.fingerprint / f"{model_type}.json"


def read_observations(hardware: Hardware, model_type: str) -> tuple[Observation, ...]:
    """Return what earlier searches observed on this device with this type of model; nothing if it can't be read."""
    path = _observations_path(hardware, model_type)
    try:
        return read_value(Observations, path).observations
    except FileNotFoundError:
        return ()
    except (OSError, ValidationError, ValueError) as error:
        logger.warning("%s: ignored, it can't be read (%s)", path, type(error).__name__)
        return ()


def add_observations(hardware: Hardware, model_type: str, observations: Sequence[Observation]) -> None:
    """Add observations to those that are kept for the next search; where home can't be written, do without."""
    known: dict[str, Observation] = {}
    for observation in (*read_observations(hardware, model_type), *observations):
        known.pop(observation.key, None)  # what was measured again is the latest
        known[observation.key] = observation
    path = _observations_path(hardware, model_type)
    try:
        writable("corrections", hardware.fingerprint)
        write_value(Observations(schema_version=2, observations=tuple(known.values())[-_MOST_OBSERVATIONS:]), path)
    except Exception as error:
        logger.warning("%s: corrections are not kept (%s)", path, error)
