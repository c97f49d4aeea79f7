"""Brings about what runs the trials of a search: one runner, the places of this machine, or the nodes of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from autotune.errors import InputError, MachineError
from autotune.execution.places import Place, hardware_of, places_of, shared_note
from autotune.execution.pool import LocalPool, OnePlace, Pool
from autotune.execution.ray_pool import RayPool, joined
from autotune.execution.runner import LocalRunner
from autotune.planning.options import SearchOptions
from autotune.values.hardware import Hardware, detect
from autotune.values.placement import Allotment, Fleet


class Crew(NamedTuple):
    """What a search is run with."""

    allotment: Allotment
    asker: LocalRunner  # answers what has to be known before the first trial
    pool: Pool


def check(options: SearchOptions) -> None:
    """Refuse what can't go together with trials at several places.

    Raises:
        InputError: Something can't.
    """
    fleet = options.fleet
    for option, value in (("--address", fleet.address), ("--kind", fleet.kind)):
        if value is not None and fleet.engine == "local":
            raise InputError(f"{option} {value}: this is about a cluster; add --engine ray")
    if fleet.is_single:
        return
    given = "--engine ray" if fleet.engine == "ray" else f"--workers {fleet.workers}"
    if options.devices == "all":
        raise InputError(f"--devices all: with {given} say how many devices each trial has")
    if options.exhaustive:
        raise InputError(f"--exhaustive: every point is measured alone, on one machine; leave out {given}")
    if options.device.startswith("cuda:"):
        raise InputError(f"--device {options.device}: names one device alone; with {given} say --device cuda")


@contextlib.contextmanager
def crew_of(
    fleet: Fleet, run_directory: Path, *, device: str = "auto", planned: Hardware | None = None
) -> Iterator[Crew]:
    """Yield what runs the trials of a search in `run_directory`; leaving ends all that was started.

    Args:
        fleet: What was asked for.
        run_directory: The search's.
        device: Which is tuned for.
        planned: What each trial of a search that goes on has had until now.

    Raises:
        MachineError: The devices that were asked for aren't there.
        InfrastructureError: The cluster can't be joined.
    """
    if fleet.engine == "ray":
        with joined(fleet.address) as cluster, LocalRunner(run_directory, detect("cpu")) as asker:
            allotment = cluster.allotment(fleet, device, planned)
            with RayPool(run_directory, cluster) as nodes:
                yield Crew(allotment, asker, nodes)
    elif fleet.is_single:
        hardware = planned or detect(device)
        with LocalRunner(run_directory, hardware) as runner:
            yield Crew(Allotment(hardware=hardware), runner, OnePlace(runner))
    else:
        places, allotment = _allotted(fleet, device, planned)
        with LocalPool(run_directory, allotment.hardware, places) as pool:
            yield Crew(allotment, pool.first, pool)


def _allotted(fleet: Fleet, device: str, planned: Hardware | None) -> tuple[tuple[Place, ...], Allotment]:
    """Return the places of this machine and what a trial has at each."""
    whole, workers = detect(device if planned is None else planned.kind), fleet.workers or 1
    places = places_of(whole, workers, each=fleet.devices)
    hardware = hardware_of(whole, places)
    if planned is not None and (planned.name, planned.cores) != (hardware.name, hardware.cores):
        raise MachineError(
            f"the search was begun with {planned.cores} cores of {planned.name} for each trial; this machine has "
            f"{hardware.cores} of {hardware.name} for each of {workers} now"
        )
    if not hardware.is_cpu:
        where = ", ".join(place.shown for place in places)
        note = f"{workers} trials at a time, on {where}; finals and checks run one at a time on {places[0].shown}"
        return places, Allotment(hardware=planned or hardware, notes=(note,))
    return places, Allotment(hardware=planned or hardware, is_shared=True, notes=(shared_note(workers, hardware),))
