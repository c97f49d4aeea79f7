"""`find`, `preview` and `resume`, which plan and run a search for Python code and for the command line."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import InputError, explaining_files
from autotune.execution.ray_pool import RayPool
from autotune.integrations.trackers import check as check_trackers
from autotune.output.progress import observing
from autotune.planning.options import SearchOptions, options_of, takes_options
from autotune.planning.plan import SearchPlan
from autotune.planning.planner import Subject, start_of
from autotune.planning.user_code import Knobs, UserLoop, UserTrainer, own_knobs
from autotune.search.cost_model import check_fits, cost_model
from autotune.search.run import Backend, Preview, backend_of, check_fleet, conduct, wanted_file, with_network
from autotune.search.run import preview as previewed
from autotune.storage import trust
from autotune.storage.run_directory import RunDirectory, default_run_directory, read_plan, read_result
from autotune.training.trainer_pickle import model_on_cpu
from autotune.tuning_result import TuningResult, with_methods
from autotune.units import show_memory, show_time
from autotune.values.budget import Effort
from autotune.values.problem import Note, Observer, Phase, PhaseBegan
from autotune.values.time_spent import Stopwatch, command_began
from autotune.values.trial import Description, Inquiry
from autotune.values.workload import OwnKnobs


@explaining_files()
@takes_options(SearchOptions)
def find(
    model: str | None = None,
    *,
    step: Callable[..., Any] | None = None,
    knobs: Knobs | None = None,
    trainer: Any = None,
    make_trainer: Callable[[], Any] | None = None,
    script: Sequence[str] | None = None,
    run_dir: str | Path | None = None,
    quiet: bool = False,
    observer: Observer | None = None,
    **options: Any,
) -> TuningResult:
    """Find the fastest training configuration that fits the memory of a device.

    Options may be given as text, as on the command line: '24GiB', '10m', '20B'.

    Args:
        model: A name of the catalogue, a directory with `config.json`, or a hub id.
        step: A training loop of your own in place of the Trainer: a function that takes a :class:`TrainConfig`, and the
            argument `accumulation_steps` if it has one, sets training up and returns a function that runs one optimizer
            step, and may return its loss. It raises ValueError where it can't run. With `model`, too, it is predicted.
        knobs: The fields of :class:`TrainConfig` that `step` honours, optionally with the values to try:
            ``["per_device_train_batch_size"]`` or ``{"precision": ["fp32", "bf16"]}``; or give a `space` instead.
            ``model_parallel`` says how many devices share a sample; an :class:`OwnKnob` is an argument of `step`.
        trainer: A `transformers.Trainer` of your own, with its model, data, loss and arguments, which are the baseline.
            Each trial works on a copy.
        make_trainer: A function that makes such a Trainer, if it can't be pickled or is too large.
        script: The command line of a script that calls `Trainer.train`, such as ``["python", "train.py", "--bf16"]``.
        run_dir: Where everything is kept; ``runs/<model>-<time>-<process>`` by default.
        quiet: Report no progress. Without an observer, progress is logged (logger `autotune`, level INFO) if logging is
            set up for that, and otherwise shown on stderr if that is a terminal or a notebook.
        observer: Receives each :data:`autotune.values.problem.Event` in place of the log or stderr.
        **options: The options below.

    Raises:
        InputError: An argument can't be used.
        MachineError: The device isn't present.
        NothingFitsError, NothingPassedError: No configuration fits, or each that fits failed a check.
        InfrastructureError: Trials can't be run.
        SearchInterrupted: Ctrl-C; its `result` is the answer so far.
    """
    stopwatch = Stopwatch("planning", since=command_began.get())
    asked = _options(model or "", options, own_knobs(knobs))
    with model_on_cpu(trainer), observing(observer, quiet=quiet) as heard:
        subject = subject_of(asked, knobs, trainer=trainer, make_trainer=make_trainer, script=script, step=step)
        check_fleet(subject.options)
        directory = RunDirectory.create(Path(run_dir) if run_dir is not None else default_run_directory(subject.name))
        with directory, backend_of(subject.options.fleet, directory.path, device=asked.device) as backend:
            plan = planned(subject, directory, backend, heard, stopwatch, searches=True).with_files()
            directory.write_plan(plan)
            trust.remember(plan)
            return with_methods(conduct(plan, directory, backend, heard, stopwatch))


@explaining_files()
@takes_options(SearchOptions)
def preview(
    model: str = "", *, script: Sequence[str] | None = None, observer: Observer | None = None, **options: Any
) -> Preview:
    """Return what :func:`find` would try with these arguments; no trial is run, and no run directory is made.

    A script is run up to its training. The record of earlier searches isn't read. Errors are those of :func:`find`.
    """
    asked = _options(model, options)
    subject = subject_of(asked, script=script)
    check_fleet(subject.options)
    folder = Path(tempfile.mkdtemp(prefix="autotune-"))  # for the processes that look at the model
    try:
        with (
            observing(observer, quiet=False) as heard,
            RunDirectory.create(folder / "run") as directory,
            backend_of(subject.options.fleet, directory.path, device=asked.device) as backend,
        ):
            plan = planned(subject, directory, backend, heard, Stopwatch("planning"))
            heard(PhaseBegan(phase=Phase.PREDICTING))
            # It is to be looked at soon; a search traces for longer.
            known = cost_model(plan, backend.asker, directory.path, heard, most_s=10.0)
            check_fits(plan, known, backend.asker, heard)
            return previewed(plan, known)
    finally:
        with contextlib.suppress(OSError):  # it stays if an error names a log in it
            folder.rmdir()


def _options(model: str, given: Mapping[str, Any], own: OwnKnobs | None = None) -> SearchOptions:
    options = options_of(SearchOptions, {**given, "model": model, "output": wanted_file(given.get("output"))}, own)
    for name in ("data", "baseline", "space"):
        read, written = getattr(options, name), options.output
        if read is not None and written is not None and Path(read).resolve() == Path(written).resolve():
            raise InputError(f"--output {written}: would overwrite the file of --{name}; name another")
    check_trackers(options.report_to)
    return options


def subject_of(options: SearchOptions, knobs: Knobs | None = None, **own: Any) -> Subject:
    """Return the user's `own` loop, Trainer or script to tune if one is given, otherwise the model."""
    given = {name: value for name, value in own.items() if value is not None}
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are each a training of its own; give one of them")
    if "step" in given:
        return UserLoop(options, given["step"], knobs)
    if knobs is not None:
        raise InputError("knobs: is of a step of your own; only=... names knobs of a model, a Trainer or a script")
    if given:
        return UserTrainer(options, **given)
    if not options.model:
        raise InputError("nothing to tune: give a model, or a trainer, make_trainer, script or step of your own")
    return Subject(options, options.model)


def planned(
    subject: Subject,
    directory: RunDirectory,
    backend: Backend,
    observer: Observer,
    stopwatch: Stopwatch,
    *,
    searches: bool = False,
) -> SearchPlan:
    """Have a child look at the model or the code, tell the notes on it and return the plan, within a search's time."""
    asker, options = backend.asker, subject.options
    earlier = None if options.against is None else read_result(options.against)
    asker.launch()  # the child imports libraries while this process reads the model's config
    start = start_of(options, backend.allotment)
    if searches:
        asker.ends_at = stopwatch.started_at + start.budget.max_time_s
    asker.check_time()
    subject.keep(directory.path)
    told: list[str] = []

    def tell(notes: Sequence[str]) -> None:
        for text in notes[len(told) :]:
            observer(Note(text=text))
            told.append(text)

    def describe(request: Inquiry) -> Description:
        tell(start.notes)
        stopwatch.enter("launching")
        asker.start()
        stopwatch.enter("describing")
        observer(PhaseBegan(phase=Phase.LOOKING))
        if isinstance(backend.pool, RayPool) and request.workload.own_code is not None:
            return backend.pool.describe(request)  # it may need a device
        return asker.describe(request)

    if options.fleet.engine == "local" and (free := shutil.disk_usage(directory.path).free) < 1 << 30:
        observer(Note(text=f"only {show_memory(free)} of disk are free where {directory.path} lies"))
    plan = subject.plan(start, describe)
    if isinstance(backend.pool, RayPool) and plan.hardware.nodes > 1:
        stopwatch.enter("measuring the network")
        plan = with_network(plan, backend.pool)
    if earlier is not None:
        plan = plan.with_earlier(earlier)
    stopwatch.enter("planning")
    tell(plan.notes)
    return plan


@explaining_files()
def resume(
    run_dir: str | Path,
    *,
    max_time: str | float | None = None,
    max_trials: int | None = None,
    effort: Effort | str | None = None,
    output: str | Path | None = None,
    trust_run_dir: bool = False,
    quiet: bool = False,
    observer: Observer | None = None,
) -> TuningResult:
    """Resume the search in `run_dir`; nothing that was measured is measured again.

    Limits that are given replace those of the search for good. They hold for the whole search, including what it has
    spent already, so that a search that has ended goes on if they are raised.

    Args:
        run_dir: Run directory of the search.
        max_time: Time limit of the whole search, in seconds or as '10m'; by default as before.
        max_trials: Most trials of the whole search; by default as before.
        effort: 'quick', 'standard' or 'thorough', which sets all limits that aren't given; by default as before.
        output: File that the answer is written to as well; by default the one that was given to :func:`find`.
        trust_run_dir: Run the scripts, pickled functions and models' own code in `run_dir` although this user did not
            begin the search on this machine. Otherwise such code is refused with a message that lists it.
        quiet: As in :func:`find`.
        observer: As in :func:`find`.

    Raises:
        RunDirectoryError: `run_dir` holds no search, another process is running it, or its code isn't trusted.
        MachineError: The search was begun on another machine.
        InputError: An argument can't be used.
        NothingFitsError, NothingPassedError, InfrastructureError, SearchInterrupted: As in :func:`find`.
    """
    stopwatch = Stopwatch("planning", since=command_began.get())
    given = {"max_trials": max_trials, "max_time": max_time, **({} if effort is None else {"effort": effort})}
    limits = options_of(SearchOptions, {"model": "", **given})
    with RunDirectory.existing(Path(run_dir)) as directory, observing(observer, quiet=quiet) as heard:
        before, restored = read_plan(directory.path), directory.restore()
        results = directory.results()
        trust.check(directory.path, before, trusted=trust_run_dir, delivers=output is None)
        plan = before.reopened(results, effort=None if effort is None else limits.effort,
            max_trials=limits.max_trials, max_time_s=limits.max_time_s, output=wanted_file(output or before.output),
        )  # fmt: skip
        others = plan.changed_packages()
        news = [*plan.changed_files(), *others]
        update = {"record": plan.record and not others, "notes": tuple(dict.fromkeys((*plan.notes, *news)))}
        plan = plan.model_copy(update=update)  # in the record versions decide what compares
        for text in (*restored, *news):
            heard(Note(text=text))
        directory.write_plan(plan)
        trust.remember(plan)
        if plan.budget != before.budget:
            whole = f"{show_time(plan.budget.max_time_s)} and {plan.budget.max_trials} trials"
            heard(Note(text=f"the limits are {whole} now, with all that is spent"))
        with backend_of(plan.fleet, directory.path, planned=plan.hardware) as backend:
            stopwatch.enter("launching")
            backend.asker.start()
            result = conduct(plan, directory, backend, heard, stopwatch)
        if results and len(directory.results()) == len(results):
            said = "no trial was run: the search is over, or what is left isn't enough for one"
            heard(Note(text=f"{said} (--max-time, --max-trials and --effort give it more)"))
    return with_methods(result)
