"""Runs a planned search: starts backend, record, trackers and cost model, and saves the answer; or previews it.

Trials run at one place, at several places of this machine, or on the nodes of a Ray cluster (:func:`backend_of`). A
place is a device, several devices of one training, or some of the CPU's cores.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from autotune.cost.model import CostModel
from autotune.errors import AutotuneError, InputError, writing
from autotune.execution.cluster import joined
from autotune.execution.network import NETWORK_LIMIT_S
from autotune.execution.places import Place, hardware_of, places_of, sharing_notes
from autotune.execution.ray_pool import RayPool
from autotune.execution.runner import LocalRunner, Runner
from autotune.integrations.trackers import Tracking
from autotune.planning.options import SearchOptions
from autotune.planning.plan import SearchPlan
from autotune.search.cost_model import check_fits, cost_model, learn, measured_model, program_tracer
from autotune.search.earlier import EarlierSearches
from autotune.search.sampler import CostModelSampler
from autotune.search.tuner import SearchInterrupted, Tuner
from autotune.space.knobs import MICRO_BATCH, changes, in_words, knobs, make_point
from autotune.storage.run_directory import RunDirectory
from autotune.storage.writer import record_writer
from autotune.units import show_memory
from autotune.value import Value, check_savable
from autotune.values.budget import Budget
from autotune.values.config import Parallelism, TrainConfig
from autotune.values.hardware import Hardware, detect
from autotune.values.problem import Allotment, Change, Fleet, Observer, Phase, PhaseBegan, Problem
from autotune.values.result import ResultData
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Prediction, Purpose


class Backend(NamedTuple):
    """Where a search runs its child processes and its trials."""

    allotment: Allotment  # the hardware of each trial
    asker: LocalRunner  # runs the child processes that come before the first trial
    pool: Runner  # runs the trials


def check_fleet(options: SearchOptions) -> None:
    fleet = options.fleet
    for option, value in (("--address", fleet.address), ("--kind", fleet.kind)):
        if value is not None and fleet.engine == "local":
            raise InputError(f"{option} {value}: this is about a cluster; add --engine ray")
    if fleet.is_single:
        return
    given = "--engine ray" if fleet.engine == "ray" else f"--workers {fleet.workers}"
    if "all" in options.devices:
        raise InputError(f"--devices all: with {given} say how many devices each trial has")
    if fleet.devices % fleet.nodes:
        why = "say how many devices all of them have together" if fleet.devices == 1 else "they aren't shared equally"
        raise InputError(f"--nodes {fleet.nodes} --devices {fleet.devices}: {why}")
    if options.device.startswith("cuda:"):
        raise InputError(f"--device {options.device}: names one device alone; with {given} say --device cuda")


@contextlib.contextmanager
def backend_of(
    fleet: Fleet,
    run_directory: Path,
    *,
    device: str = "auto",
    planned: Hardware | None = None,
    python: str = sys.executable,
) -> Iterator[Backend]:
    """Yield the backend of a search in `run_directory`, and end all processes that it started.

    A new search tunes for `device`, one that is resumed for the `planned` hardware of each trial. `python` runs
    them, but for those on a cluster. MachineError: the devices aren't present, or aren't those of the resumed search.
    InfrastructureError: the cluster can't be joined.
    """
    if fleet.engine == "ray":
        with joined(fleet.address) as cluster, LocalRunner(run_directory, detect("cpu")) as asker:
            allotment = cluster.allotment(fleet, device, planned)
            with RayPool(run_directory, cluster) as nodes:
                yield Backend(allotment, asker, nodes)
        return
    whole, places, notes = planned or detect(device), tuple[Place, ...](), list[str]()
    devices, hardware = ([] if whole.is_cpu else [whole.device]), whole
    if not fleet.is_single:
        whole = detect(device if planned is None else planned.kind)
        places = places_of(whole, fleet.workers or 1, each=fleet.devices)
        hardware, devices = planned or hardware_of(whole, places), [name for place in places for name in place.devices]
        at_once = f"{fleet.workers} trials at a time, on {', '.join(place.shown for place in places)}"
        notes.append(f"{at_once}; finals and checks run one at a time on {places[0].shown}")
    allotment = Allotment(hardware=hardware, notes=(*notes, *sharing_notes(devices)))
    with LocalRunner(run_directory, hardware, places=places) as runner:
        runner.python = python
        yield Backend(allotment, runner, runner)


def with_network(plan: SearchPlan, pool: RayPool) -> SearchPlan:
    """Return the plan with the rate between its machines as measured; InfrastructureError: they reach none."""
    most = Parallelism(world_size=plan.hardware.count or 1)
    config = plan.baseline.model_copy(update={"parallelism": most, MICRO_BATCH: 1})
    gb_s = pool.network_gb_s(plan.request_of(config, Purpose.BASELINE, number=0, timeout_s=NETWORK_LIMIT_S))
    note = f"each machine attains {gb_s:.3g} GB/s to the others, measured by all-reduces of all devices"
    hardware = plan.hardware.model_copy(update={"network_gb_s": gb_s})
    return plan.model_copy(update={"hardware": hardware, "notes": (*plan.notes, note)})


def conduct(
    plan: SearchPlan, directory: RunDirectory, backend: Backend, observer: Observer, stopwatch: Stopwatch
) -> ResultData:
    """Run a search to its end and return the answer; observations are stored however it ends. Raises as `Tuner.run`."""

    def left_s() -> float:
        return plan.budget.max_time_s - stopwatch.elapsed_s()

    trackers = Tracking(plan, directory, observer)
    writer = record_writer(plan, directory, trackers)
    stopwatch.enter("tracing")
    writer(PhaseBegan(phase=Phase.PREDICTING))
    model = cost_model(plan, backend.asker, directory.path, writer, left_s=left_s())
    stopwatch.enter("planning")
    if not directory.results():
        check_fits(plan, model, backend.asker, writer)
    earlier = EarlierSearches(plan, writer.earlier())
    is_here = backend.asker is backend.pool  # otherwise the devices are those of a cluster's machines
    if model is not None and is_here:
        stopwatch.enter("measuring operators")
        model = measured_model(plan, model, backend.asker, left_s=left_s())
        stopwatch.enter("planning")
    backend.asker.check_time()
    # Where trials run side by side the device is never free.
    is_free = is_here and plan.fleet.is_single
    trace = program_tracer(plan, backend.asker, writer, left_s) if is_free else None
    try:
        result = Tuner(
            plan, directory, backend.pool, writer, model=model, earlier=earlier, trace=trace, starting=stopwatch.laps()
        ).run()
    except SearchInterrupted as interrupted:
        deliver(interrupted.result, plan.output, directory.path)
        raise
    finally:
        learn(plan, model, directory.results())
    writer.end(result)
    trackers.end(result)
    deliver(result, plan.output, directory.path)
    return result


def wanted_file(output: str | Path | None) -> str | None:
    """Return the absolute path of `--output`, after a check before the search begins that it can be written."""
    if output is None:
        return None
    path = Path(output).absolute()
    with writing(f"--output {output}"):
        check_savable(path, '"autotune_version"')
    return str(path)


def deliver(result: ResultData | None, path: str | None, run_directory: Path) -> None:
    if result is not None and path is not None:
        try:
            result.save(path)
        except AutotuneError as error:
            raise type(error)(f"--output {error}; the answer is in {run_directory}") from None


class ExpectedTrial(Value):
    """One of the first trials, with its prediction before anything is measured."""

    config: TrainConfig
    changes: tuple[Change, ...]
    predicted: Prediction | None = Field(description="None: nothing can be predicted")


class Preview(Problem):
    """A search before its first trial."""

    schema_version: Literal[1] = 1
    budget: Budget = Field(description="limits of the search and of each trial")
    configurations: int = Field(description="that may be tried, the baseline included")
    knobs: dict[str, tuple[str, ...]] = Field(description="of several values, which are written as for --fix")
    values_refused: dict[str, tuple[str, ...]] = Field(description="values that no configuration may have, by reason")
    refused: dict[str, int] = Field(description="numbers of configurations that may not be tried, by reason")
    first_trials: tuple[ExpectedTrial, ...] = Field(description="in their order if each gives what is predicted")
    notes: tuple[str, ...]


def preview(plan: SearchPlan, model: CostModel | None) -> Preview:
    sampler = CostModelSampler(plan, model)
    space, legal = sampler.space, sampler.space.legal
    refused = Counter({reason: count * len(space.loadings) for reason, count in space.judged[1].items()})
    if too_large := sampler.count_beyond_memory():
        refused[f"predicted to need more than the budget of {show_memory(plan.memory_bytes)}"] = too_large
    options = {knob.parameter: knob.option for knob in knobs()}
    left_out: dict[str, tuple[str, ...]] = {}
    for (name, value), reason in space.left_out.items():
        left_out[reason] = (*left_out.get(reason, ()), in_words(name, value).replace("=", " ", 1))
    values, configs = {}, [plan.baseline, *legal]
    for name, choices, _ in space.dimensions:
        having = dict(zip(map(attrgetter(name.partition(".")[0]), configs), configs, strict=True)).values()
        there = {point[name] for point in (*map(make_point, having), *space.loadings) if name in point}
        if len(there) > 1:
            values[options[name]] = tuple(in_words(name, c).partition("=")[2] for c in choices if c in there)
    # Six trials at most: later ones depend on the measurements of these.
    first = [
        ExpectedTrial(config=config, changes=changes(config, plan), predicted=sampler.prediction(config))
        for config in sampler.foreseen(min(6, plan.budget.max_trials + 1))
    ]
    return Preview(
        **plan.problem_fields(), budget=plan.budget, notes=plan.notes, first_trials=tuple(first),
        configurations=len(legal) * len(space.loadings) + (plan.baseline not in legal) - too_large,
        knobs=values, values_refused=left_out, refused=dict(refused.most_common()),
    )  # fmt: skip
