"""`autotune estimate`: predicts memory and speed of a training on a device that need not be present; nothing is run.

`report` answers the command. If a knob is given, it predicts that one configuration, otherwise it ranks configurations,
the devices of the table (`--gpu all`) or the ways to share several devices (`--devices N`). `estimate` is the function
of the Python API. The notes of a report name every default that was chosen.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from autotune.cost.profile import REFERENCE, Profile
from autotune.errors import InputError, NothingFitsError
from autotune.estimates import report as reports
from autotune.estimates import request
from autotune.estimates.fitting import nothing_fits, would_fit
from autotune.estimates.forecast import Forecast, Question
from autotune.estimates.many_devices import spread
from autotune.planning.options import EstimateOptions, options_of, takes_options
from autotune.space.knobs import changes, in_words, make_point
from autotune.space.space import LOADING, SearchSpace
from autotune.training import resolve
from autotune.units import show_memory
from autotune.values.catalogue import gpus
from autotune.values.config import Allowance, Precision, TrainConfig
from autotune.values.estimate import CostEstimate, MemoryBreakdown
from autotune.values.workload import Workload

# Knobs that a note names where they aren't given: those that decide most of memory and time.
_NAMED = ("per_device_train_batch_size", "precision", "optim", "attn_implementation", "checkpointing")

# Arguments of `estimate` that are options of the command as well, those of the workload first.
_OF_WORKLOAD = ("task", "seq_len", "target_len", "global_batch", "images", "image_size", "freeze_vision")
_ASKED = (*_OF_WORKLOAD, "gpu", "device", "nodes", "revision", "trust_remote_code", "eval_batch", "eval_samples")

BEST = 8  # configurations that a ranking shows

RANKED = (
    "ranked: precision (bf16 stands for fp16 where the device has both), tf32, micro-batch, optimizer, checkpointing; "
    "with --allow method pure bf16 and LoRA too; --fix estimates other knobs (attention, experts, compile, "
    "adapter-rank, chunked-loss, QLoRA as adapter=lora,quantization=nf4)"
)


def report(options: EstimateOptions) -> reports.Report:
    """Return the estimate that `options` ask for, or raise a NothingFitsError if a ranking has nothing that fits.

    A single configuration that doesn't fit is no error here: its report says so (see `shortfall`).
    """
    request.check(options)
    point = options.point
    target = None if options.gpu == "all" else request.target_of(options).with_packages(point)
    workload, said = request.workload_of(options, "cuda" if target is None else target.device.hardware.kind)
    if options.tokens is not None:
        reports.tokens_per_sample(workload)
    question = Question.of(options, workload)
    if target is None:
        return survey(question, said)
    if options.devices > 1 and not request.WAY & point.keys():
        return spread(question, target, (*target.notes, *said))
    forecast = question.forecast(target, question.network(target))
    notes = (*target.notes, *said)
    return _configuration(question, forecast, notes) if point else ranking(question, forecast, notes)


@takes_options(EstimateOptions, only=_ASKED)
def estimate(
    model: str | None = None, *, config: TrainConfig, workload: Workload | None = None, **options: Any
) -> CostEstimate:
    """Return the predicted memory and time of a configuration, whether or not it fits; nothing is run.

    Args:
        model: A name of the catalogue, a directory with `config.json`, or a hub id.
        config: The configuration.
        workload: What is trained, instead of `model` and the options that describe it.
        **options: The options below.

    Raises:
        InputError: An argument can't be used, or the device or the model can't run the configuration.
        MachineError: The device isn't present.
    """
    if model is None and workload is None:
        raise InputError("estimate: needs a model or a workload")
    if not isinstance(config, TrainConfig):
        raise InputError(f"estimate: config: expected a TrainConfig, not {type(config).__name__}")
    if not isinstance(workload, Workload | None):
        raise InputError(f"estimate: workload: expected a Workload, not {type(workload).__name__}")
    name = model or (workload.model.reference if workload else "")
    asked = options_of(EstimateOptions, {**options, "model": name, "devices": config.parallelism.world_size})
    request.check(asked)
    target = request.target_of(asked).with_packages(make_point(config))
    said: tuple[str, ...] = ()
    if workload is None:
        workload, said = request.workload_of(asked, target.device.hardware.kind)
    elif given := [name for name in _OF_WORKLOAD if options.get(name)]:
        raise InputError(f"estimate: {given[0]} is part of the workload")
    elif model is not None and resolve.resolve(model).name != workload.model.name:
        raise InputError(f"estimate: model {model!r} is not that of the workload, {workload.model.name}")
    question = Question.of(asked, workload)
    forecast = question.forecast(target, question.network(target))
    _check_possible(forecast, config)
    found = forecast.estimate(config)
    return found.model_copy(update={"notes": (*target.notes, *said, *forecast.basis(config), *found.notes)})


def _check_possible(forecast: Forecast, config: TrainConfig) -> None:
    if reason := forecast.plan.refusal(config):
        raise InputError(f"not possible on {forecast.device.name}: {reason}")


def _configuration(question: Question, forecast: Forecast, notes: tuple[str, ...]) -> reports.ConfigReport:
    plan, point, said, remedy = forecast.plan, question.options.point, list(notes), None
    config = request.config_of(plan, point)
    _check_possible(forecast, config)
    found, values = forecast.predicted(config), make_point(config)
    if found.memory.phase == "evaluation":
        phases = [p for p in found.memory.phases if p.name not in ("evaluation", "saving")]
        training = show_memory(max(phase.allocated_bytes for phase in phases))
        remedy = (
            f"the peak is that of the evaluation, and training has {training} allocated at most: a smaller "
            "--eval-batch takes less, and so do fewer --eval-samples (eval_accumulation_steps moves logits to the host)"
        )
        said.insert(0, remedy)
    if rest := [in_words(name, values[name]) for name in _NAMED if name not in point]:
        said.append(f"not given, so as by default: {', '.join(rest)} (--fix)")
    halved = config.model_copy(update={"precision": Precision.PURE_BF16})
    is_adapted = config.adapter is not None and config.quantization is None
    if is_adapted and config.precision in ("bf16", "fp16") and plan.refusal(halved) is None:
        said.append(f"with {config.precision} the frozen weights stay in fp32; precision=pure_bf16 halves them")
    if loading := [in_words(name, value) for name, value in point.items() if name in LOADING]:
        said.append(f"data loading isn't predicted: {', '.join(loading)} changes nothing here")
    if not plan.hardware.is_cpu and (profile := forecast.model.profile(config)) is not None:
        completions = plan.workload.samples_per_step(config)
        if told := vllm_note(found.memory, profile, forecast.device.memory_bytes, completions):
            said.append(told)
    taken, there = question.host_memory(forecast.device.hardware, found)
    host_short = None
    if there is not None and taken > there:
        host_short = f"of each node's memory it takes {show_memory(taken)}, and that has {show_memory(there)}"
        said.insert(0, f"does not fit the host: {host_short} (--host-memory)")
    if not found.fits_at_all:
        remedy = remedy or would_fit(forecast, config, Allowance.METHOD, given=point)
    return reports.ConfigReport(
        workload=plan.workload,
        device=forecast.device,
        predicted=found,
        largest_micro_batch=forecast.largest_micro_batch(config),
        would_fit=None if found.fits_at_all else remedy,
        host_short=host_short,
        alive=forecast.model.alive(config) if question.options.explain else (),
        run=question.run(found),
        notes=(*said, *forecast.basis(config), *found.notes),
    )


def vllm_note(memory: MemoryBreakdown, profile: Profile, device_bytes: int, completions: int) -> str | None:
    """Return which shares of a device vLLM may take beside a training (TRL's `use_vllm` with `colocate`).

    vLLM takes its share at the start, for weights in 16 bits and for keys and values. With sleep mode it gives both
    back while weights are trained (TRL 1.16 has it sleep at level 2), so that the share has to leave room for the
    weights and optimizer states alone. What vLLM computes with comes out of its share too, so the completions told are
    the most. None: the recipe generates nothing, or no keys are kept. `memory`: of the training that generates by
    transformers; `completions`: of a step.
    """
    how = profile.generation
    if how is None or not how.cached_bytes(1):
        return None
    trains = max(phase.allocated_bytes for phase in memory.phases if phase.name != "generation")
    beyond = memory.device_peak_bytes - memory.allocated_peak_bytes
    rests = memory.weights_bytes + memory.optimizer_state_bytes + beyond
    named = zip(profile.names, profile.made, strict=True)
    elements = sum(group.elements for name, group in named if not group.adapter and not name.startswith(REFERENCE))
    weights, wide = 2 * elements, 1 if profile.family.half else 2
    cached = how.cached_bytes(how.prompt + how.completion) / wide

    def share(taken: float) -> str | None:
        rounded = int(100 * (1 - taken / device_bytes)) / 100
        at_once = int((rounded * device_bytes - weights) / cached)
        if at_once < 1:
            return None
        held = f"all {completions:,}" if at_once >= completions else f"at most {at_once:,} of {completions:,}"
        return f"up to {rounded:.2f}, which holds {held} completions at once"

    beside, asleep = share(trains + beyond), share(rests)
    sleeping = f"with vllm_enable_sleep_mode {asleep}" if asleep else "nor with vllm_enable_sleep_mode"
    told = f"{beside}; {sleeping}" if beside else f"no share fits beside the training; {sleeping}"
    return f"vllm_gpu_memory_utilization, vLLM's weights taking {show_memory(weights)}: {told}"


def ranking(question: Question, forecast: Forecast, notes: tuple[str, ...]) -> reports.RankingReport:
    plan, configs = forecast.plan, forecast.plan.every_config()
    best, fitting = forecast.fastest(configs, BEST)
    if not best:
        raise nothing_fits(forecast, configs, plan.allowance)
    rows = tuple(forecast.predicted(c).model_copy(update={"changes": changes(c, plan)}) for c in best)
    untraced = (f"not ranked: {reason}" for reason in dict.fromkeys(map(str, question.profiles.failures.values())))
    return reports.RankingReport(
        workload=plan.workload,
        device=forecast.device,
        allowance=plan.allowance,
        considered=len(configs),
        fitting=fitting,
        baseline=plan.baseline,
        best=rows,
        run=question.run(rows[0]),
        notes=(*notes, RANKED, *left_out(plan.search_space), *untraced, *forecast.basis(best[0]), *rows[0].notes),
    )


def left_out(space: SearchSpace) -> tuple[str, ...]:
    """Return a line for each reason why values aren't ranked, with the values."""
    reasons: dict[str, list[str]] = {}
    for (name, value), reason in space.left_out.items():
        # The parameters for which the notes name the values that are not ranked.
        if name in ("precision", "tf32", "optim", "checkpointing", "adapter"):
            reasons.setdefault(reason, []).append(in_words(name, value))
    return tuple(f"not ranked: {', '.join(options)}: {reason}" for reason, options in reasons.items())


def survey(question: Question, notes: tuple[str, ...]) -> reports.DevicesReport:
    """Return the best predicted configuration of each device of the table, fastest first."""
    legal: dict[object, list[TrainConfig]] = {}  # of devices with the same abilities
    rows: list[reports.DeviceRow] = []
    tried: list[tuple[Forecast, list[TrainConfig]]] = []
    for gpu in gpus():
        forecast = question.forecast(request.table_target(gpu).with_packages(question.options.point))
        plan, device = forecast.plan, forecast.device
        if question.options.point:
            sized = question.with_micro_batches(request.config_of(plan, question.options.point))
            whys = [plan.refusal(config) for config in sized]
            configs = [config for config, reason in zip(sized, whys, strict=True) if reason is None]
            if not configs:
                rows.append(reports.DeviceRow(device=device, why_not=str(whys[-1]).replace(plan.hardware.name, "it")))
                continue
        else:
            # A rule reads no other ability that differs in the table.
            abilities = plan.hardware.capability, plan.hardware.arithmetic
            if abilities not in legal:
                legal[abilities] = plan.every_config()
            configs = legal[abilities]
        tried.append((forecast, configs))
        best, _ = forecast.fastest(configs, 1)
        if not best:
            least = show_memory(forecast.estimate(forecast.tightest(configs)).memory.device_peak_bytes)
            rows.append(reports.DeviceRow(device=device, why_not=f"the least takes {least}"))
            continue
        found, largest = forecast.predicted(best[0]), forecast.largest_micro_batch(best[0])
        rows.append(reports.DeviceRow(device=device, best=found, largest_micro_batch=largest, run=question.run(found)))
    if not tried:
        ((usual, _),) = Counter(row.why_not for row in rows).most_common(1)
        raise InputError(f"not possible on any device of the table: {usual}")
    if not any(row.best for row in rows):
        forecast, configs = max(tried, key=lambda pair: pair[0].device.memory_bytes)
        raise nothing_fits(forecast, configs, Allowance.METHOD if question.options.point else question.allowance)
    return reports.DevicesReport(
        workload=question.workload,
        allowance=None if question.options.point else question.allowance,
        rows=tuple(sorted(rows, key=lambda row: -row.best.samples_per_second if row.best else 0.0)),
        notes=(*notes, *[RANKED] * (not question.options.point), "rates by data sheets; nothing else on the device"),
    )


def shortfall(found: reports.Report) -> NothingFitsError | None:
    """Return an error that says by how much a single configuration misses the memory; None for any other report."""
    if not isinstance(found, reports.ConfigReport):
        return None
    if found.predicted.fits_at_all:
        return NothingFitsError(f"it does not fit the host: {found.host_short}") if found.host_short else None
    return NothingFitsError(f"it does not fit: it {found.predicted.miss(found.device)}; {found.would_fit}")
