"""Makes the cost model of a search from traces, the device's rates and the observations of earlier searches.

A child process traces the model, so that the search never loads torch. Families without a trace have no prediction.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from autotune.cost.family import Family, family_of
from autotune.cost.model import CostModel, kind_of
from autotune.cost.profile import Profile
from autotune.cost.rates import ENTRY as MEASURING
from autotune.cost.rates import OperatorRequest, rates_by_table
from autotune.cost.time import parameter_key, worth_measuring
from autotune.errors import NothingFitsError
from autotune.estimates import fitting
from autotune.estimates.fitting import FitRequest
from autotune.estimates.forecast import TRACING, TraceRequest, Traces, traces_left, traces_of
from autotune.execution.noise import HostWatch
from autotune.execution.runner import LocalRunner
from autotune.planning.plan import SearchPlan
from autotune.search.candidates import Candidates, ProgramTracer
from autotune.space.knobs import changes, shown_changes
from autotune.storage.home import add_observations, add_timings, rates_of, read_observations, read_trace
from autotune.units import show_memory
from autotune.value import found_value, write_value
from autotune.values.catalogue import gpu_of
from autotune.values.conditions import QUIET_SHARE
from autotune.values.config import TrainConfig
from autotune.values.estimate import Timings
from autotune.values.model import Task
from autotune.values.problem import Note, Observer, Phase, PhaseBegan
from autotune.values.trial import TrialResult

_GRACE_S = 120.0  # for a child process to start where other processes are busy


def cost_model(
    plan: SearchPlan,
    runner: LocalRunner,
    directory: Path,
    observer: Observer,
    *,
    left_s: float = math.inf,
    most_s: float = 60.0,
) -> CostModel | None:
    """Return the cost model of a search; None if nothing can be predicted, for which the observer receives notes.

    Traces of an earlier run of this search in `directory` are used again. Tracing takes at most `most_s` of processor
    time, and a quarter of the seconds that the search has left.
    """
    code = plan.workload.own_code
    if (plan.workload.task is Task.OWN and code is None) or (code is not None and code.not_predicted is not None):
        return None
    folder = directory / "trace"
    traces = found_value(Traces, folder / "answer.json") or _trace(plan, runner, folder, left_s, most_s)
    untold = "no prediction for some configurations" if traces.profiles else "no prediction"
    for failure in traces.failures:
        observer(Note(text=f"{untold}: {failure}"))
    if traces.left:
        kinds = f"{traces.left} kind{'s' * (traces.left != 1)} of configurations"
        observer(Note(text=f"no prediction for {kinds}: tracing takes too long; they are tried all the same"))
    if not traces.profiles:
        return None
    rates = rates_of(plan.hardware)
    if not plan.hardware.is_cpu and gpu_of(plan.hardware.name) is None:
        observer(Note(text=f"times are predicted by {rates.source}, until operators are measured"))
    observations = read_observations(plan.hardware, plan.workload.model.model_type)
    return CostModel.of(plan.workload, plan.hardware, rates, traces.profiles, observations, plan.facts.experts)


def check_fits(plan: SearchPlan, model: CostModel | None, runner: LocalRunner, observer: Observer) -> None:
    """Refuse (NothingFitsError) a search in which nothing can fit; name the replacement of a baseline that can't."""
    reason = plan.too_large(plan.baseline)
    if model is None:
        fits, lightest = reason is None or bool(plan.affordable), None
    else:
        candidates = Candidates(model, plan)
        fits = candidates.may_fit or (reason is None and candidates.refusal(plan.baseline) is None)
        lightest = candidates.lightest
    if not fits:
        told = f"nothing fits, by arithmetic alone: {reason}" if reason else "nothing fits"
        if model is not None and not plan.workload.is_users_own:
            told = _what_would_fit(plan, model, runner) or told
        raise NothingFitsError(told)
    if reason is None:
        return
    observer(Note(text=f"the baseline is not run: {reason}"))
    if model is not None and lightest is not None:
        what, needed = shown_changes(changes(lightest, plan)), int(model.predict([lightest]).needed_bytes[0])
        text = f"the lightest configuration predicted to fit, {what}, takes {show_memory(needed)} and is tried first"
        observer(Note(text=text))


def _what_would_fit(plan: SearchPlan, model: CostModel, runner: LocalRunner) -> str | None:
    """Return the words of a child process on changes that would make the training fit; None: it failed."""
    # Of each optimizer and micro-batch the lightest, and the baseline, which is traced if anything is.
    configs, lightest = [plan.baseline, *plan.search_space.legal], dict[tuple[str, int], TrainConfig]()
    needed = model.predict(configs).needed_bytes
    for row in np.argsort(needed, kind="stable").tolist():
        if not math.isnan(needed[row]):
            lightest.setdefault((configs[row].optim, configs[row].per_device_train_batch_size), configs[row])
    wanted = tuple(dict.fromkeys((plan.baseline, *lightest.values())))
    request = FitRequest(plan=plan, rates=model.rates, profiles=tuple(model.profiles.values()), configs=wanted)
    with contextlib.suppress(OSError):  # 10 s of processor time are enough
        return (runner.ask("fitting", fitting.ENTRY, request, timeout_s=300.0) / fitting.ANSWER_FILE).read_text()
    return None


def model_by_data_sheet(plan: SearchPlan) -> CostModel:
    """Return a cost model by data sheet rates, without observations, traced in this process by torch."""
    profiles, rates = traces_of(_request(plan, limit_s=600)).profiles, rates_by_table(plan.hardware)
    return CostModel.of(plan.workload, plan.hardware, rates, profiles, experts=plan.facts.experts)


def learn(plan: SearchPlan, model: CostModel | None, results: Sequence[TrialResult]) -> None:
    """Store the observations of a search, if not of own code, for the next on this device with this type of model."""
    if model is None or plan.workload.is_users_own:
        return
    # Checks are left out: they also evaluate and save, or train without dropout.
    trained = [r for r in results if r.request.task is None and not r.is_disturbed]
    found = [observation for result in trained if (observation := model.observation(result)) is not None]
    if found:
        add_observations(plan.hardware, plan.workload.model.model_type, found)


def _trace(plan: SearchPlan, runner: LocalRunner, directory: Path, left_s: float, most_s: float) -> Traces:
    """Return the traces of a search, stored ones and those of a child; write them for resuming and for the report."""
    # In processor time. t5-small has 12 families on a CPU at `--effort quick`, each of about 1 s. The first takes 3 s
    # more, with the library's code, so a search of a minute would trace few of them in less than 8 s.
    limit_s = min(most_s, 0.09 * plan.budget.max_time_s)
    timeout_s = min(10 * limit_s + _GRACE_S, max(1.0, left_s / 4))  # of wall time, where other processes are busy
    request = _request(plan, limit_s=max(min(8.0, most_s), limit_s))
    model = plan.workload, request.parameters
    found = {family: profile for family in request.families if (profile := read_trace(*model, family)) is not None}
    missing = tuple(family for family in request.families if family not in found and not family.compiled)
    answer = Traces(profiles=())
    if missing:
        update = {"families": missing, "within_s": 0.7 * timeout_s}  # then the child answers with what it has
        path = runner.ask("trace", TRACING, request.model_copy(update=update), timeout_s=timeout_s) / "answer.json"
        log = path.with_name("log.txt")
        why = f"tracing the model took more than {timeout_s:.0f} s"  # ended without a word
        if log.exists() and log.stat().st_size:
            why = "tracing failed: see trace/log.txt"
        answer = found_value(Traces, path) or traces_left(path.parent, why)
        found |= {profile.family: profile for profile in answer.profiles}
    profiles = tuple(found[family] for family in request.families if family in found)
    traces = answer.model_copy(update={"profiles": profiles})
    if found:
        directory.mkdir(exist_ok=True)
        write_value(traces, directory / "answer.json")
    return traces


def program_tracer(
    plan: SearchPlan, runner: LocalRunner, observer: Observer, left_s: Callable[[], float]
) -> ProgramTracer:
    """Return a function that has a child trace inductor's programs of a family, for a tenth of the search's time.

    It returns stored traces at any time, and None where no time is left or tracing failed, which a note tells once.
    """
    workload, parameters = plan.workload, plan.facts.parameters
    ends_after_s, spent_s, failed = 0.1 * plan.budget.max_time_s, 0.0, set[Family]()

    def trace(family: Family) -> Profile | None:
        nonlocal spent_s
        stored = read_trace(workload, parameters, family)
        if stored is not None or family in failed or spent_s >= ends_after_s:
            return stored
        observer(PhaseBegan(phase=Phase.PREDICTING))
        request = TraceRequest(workload=workload, families=(family,), parameters=parameters, limit_s=600.0)
        began, timeout_s = time.monotonic(), max(1.0, min(left_s(), max(_GRACE_S, ends_after_s)))
        answer = found_value(Traces, runner.ask("programs", TRACING, request, timeout_s=timeout_s) / "answer.json")
        spent_s += time.monotonic() - began
        if answer is None or not answer.profiles:
            why = "; ".join(answer.failures) if answer is not None else "see programs/log.txt"
            failed.add(family)
            observer(Note(text=f"a compiled configuration is predicted by a rule of thumb: {why}"))
            return None
        return answer.profiles[0]

    return trace


def measured_model(plan: SearchPlan, model: CostModel, runner: LocalRunner, *, left_s: float = math.inf) -> CostModel:
    """Return a model that knows the times of operators and, on a CPU, optimizers, measured by a child if unknown."""
    limit_s = min(6.0, 0.02 * min(plan.budget.max_time_s, left_s))
    profiles, configs = list(model.profiles.values()), [plan.baseline, *plan.search_space.legal]
    calls = worth_measuring(profiles, model.rates, max(c.per_device_train_batch_size for c in configs))
    parameters = dict.fromkeys(g.model_copy(update={"count": 1}) for p in profiles for g in p.parameters if g.trained)
    known = {} if model.rates.timings is None else model.rates.timings.optimizers
    optimizers = dict.fromkeys(c.optim for c in configs) if plan.hardware.is_cpu else ()
    lacking = tuple(o for o in optimizers if any(parameter_key(o, group) not in known for group in parameters))
    # Several processes of a CPU have a share of its cores each, by which operators take other times.
    is_shared = plan.hardware.is_cpu and not plan.baseline.parallelism.is_single
    if limit_s <= 0 or is_shared or not (calls or lacking):
        return model
    request = OperatorRequest(
        device=plan.hardware.device,
        calls=tuple(calls),
        parameters=tuple(parameters),
        optimizers=lacking,
        limit_s=limit_s,
        most_bytes=min(plan.memory_bytes, plan.hardware.free_bytes) / 4,
        known=model.rates.timings,
    )
    watch = HostWatch()
    watch.begin()
    path = runner.ask("timings", MEASURING, request, timeout_s=min(_GRACE_S, max(1.0, left_s / 4))) / "answer.json"
    if (found := found_value(Timings, path)) is None:
        return model
    if (watch.conditions().others_share or 0.0) <= QUIET_SHARE:
        add_timings(plan.hardware, found)
    rates = model.rates.model_copy(update={"timings": (model.rates.timings or found).updated(found)})
    return CostModel.of(plan.workload, plan.hardware, rates, profiles, model.corrections.observations, model.experts)


def _request(plan: SearchPlan, *, limit_s: float) -> TraceRequest:
    """Return the request to trace all families of a search that may fit, the baseline's first.

    As time may end before all are traced, one family of each arithmetic and kind of adapter comes first, then those
    that differ from it in one thing, and so on.
    """
    configs = [plan.baseline, *plan.affordable]
    kinds: dict[object, TrainConfig] = {}
    for config in configs:
        kinds.setdefault(kind_of(config), config)
    own = (family_of(c, plan.hardware, plan.workload) for c in kinds.values())
    families = dict.fromkeys(f for family in own for f in (family.as_written, family))
    firsts: dict[tuple[object, ...], dict[str, object]] = {}

    def differences(family: Family) -> int:
        fields = {name: value for name, value in family if name != "adapter"} | dict(family.adapter or ())
        first = firsts.setdefault((family.dtype, family.autocast, family.quantization, fields.get("kind")), fields)
        return sum(first.get(name) != value for name, value in fields.items())

    ordered = tuple(sorted(families, key=differences))
    return TraceRequest(workload=plan.workload, families=ordered, parameters=plan.facts.parameters, limit_s=limit_s)
