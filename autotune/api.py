"""`find`, `preview` and `resume`, which plan and run a search for Python code and for the command line."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from autotune.errors import names_checked
from autotune.integrations.trackers import check as check_trackers
from autotune.output.progress import heard_by
from autotune.planning import planner, user_trainer
from autotune.planning.options import SearchOptions, fields_by_name, options_of
from autotune.planning.plan import SearchPlan
from autotune.planning.reopen import NOTHING_RUN, changed_files, differences, limits_of, reopened, with_files
from autotune.planning.user_loop import Knobs
from autotune.planning.workload import Subject
from autotune.search.cost_model import cost_model
from autotune.search.preview import Preview
from autotune.search.preview import preview as previewed
from autotune.search.run import Backend, backend_of, check, conduct, wanted_file
from autotune.storage import trust
from autotune.storage.results import restore
from autotune.storage.run_directory import RunDirectory, default_run_directory, read_plan
from autotune.tuning_result import TuningResult, with_methods
from autotune.values.budget import Effort
from autotune.values.events import Note, Observer, Phase, PhaseBegan
from autotune.values.hardware import detect
from autotune.values.knob import Allowance
from autotune.values.time_spent import Stopwatch, command_began


@names_checked()
def find(
    model: str | None = None,
    *,
    step: Callable[..., Any] | None = None,
    knobs: Knobs | None = None,
    trainer: Any = None,
    make_trainer: Callable[[], Any] | None = None,
    script: Sequence[str] | None = None,
    task: str | None = None,
    data: str | Path | None = None,
    text_field: str | None = None,
    recipe: str | None = None,
    prompt_len: int | None = None,
    completion_len: int | None = None,
    generations: int | None = None,
    reward: str | None = None,
    seq_len: int | None = None,
    target_len: int | None = None,
    images: int | None = None,
    image_size: int | None = None,
    freeze_vision: bool = False,
    global_batch: int | Literal["any"] | None = None,
    baseline: str | Path | None = None,
    allow: Allowance | str = Allowance.OPTIMIZER,
    effort: Effort | str = Effort.STANDARD,
    fix: str | Sequence[str] | Mapping[str, Any] = (),
    only: str | Sequence[str] = (),
    space: str | Path | None = None,
    device: str = "auto",
    devices: int | Literal["all"] | None = None,
    memory: str | int | None = None,
    wait: bool = True,
    max_trials: int | None = None,
    max_time: str | float | None = None,
    train_steps: int | None = None,
    train_tokens: float | str | None = None,
    check_loss: int | None = None,
    run_dir: str | Path | None = None,
    seed: int = 42,
    revision: str | None = None,
    trust_remote_code: bool = False,
    record: bool = True,
    report_to: str | Sequence[str] = (),
    workers: int | None = None,
    engine: str = "local",
    address: str | None = None,
    kind: str | None = None,
    output: str | Path | None = None,
    quiet: bool = False,
    observer: Observer | None = None,
) -> TuningResult:
    """Find the fastest training configuration that fits the memory of a device.

    Args:
        model: A name of the catalogue, a directory with `config.json`, or a hub id.
        step: A training loop of your own in place of the Trainer: a function that takes a :class:`TrainConfig`, and the
            argument `accumulation_steps` if it has one, sets training up and returns a function that runs one optimizer
            step, and may return its loss. It raises ValueError where it can't run. With `model`, too, it is predicted.
        knobs: The fields of :class:`TrainConfig` that `step` honours, optionally with the values to try:
            ``["per_device_train_batch_size"]`` or ``{"precision": ["fp32", "bf16"]}``; or give a `space` instead.
        trainer: A `transformers.Trainer` of your own, with its model, data, loss and arguments, which are the baseline.
            Each trial works on a copy.
        make_trainer: A function that makes such a Trainer, if it can't be pickled or is too large.
        script: The command line of a script that calls `Trainer.train`, such as ``["python", "train.py", "--bf16"]``.
        task: The head, a value of `Task` such as 'causal-lm'; by default that of config.json, or the usual one.
        data: JSONL, CSV, Parquet or text file to train on; by default synthetic samples.
        text_field: The column of `data` that holds the text.
        recipe: Post-training by a Trainer of TRL: 'sft', 'dpo', 'reward', 'kto', 'grpo' or 'rloo'. Prompts, completions
            and pairs are synthetic, or those of `data`.
        prompt_len: Tokens of a recipe's prompt; 256 by default, 32 on the CPU.
        completion_len: Tokens of its completion; generated ones all have so many. Of `data`, what prompt and completion
            have beyond both lengths is cut off.
        generations: Completions of a prompt that 'grpo' (8 by default) and 'rloo' (2) generate and compare. A sample of
            `global_batch` is a completion.
        reward: The reward function of generated completions, as "module:function"; by default one that takes no time.
        seq_len: Tokens of a sample, or frames of sound (20 ms of wav2vec 2.0); 512 by default, 64 on the CPU. Whisper
            takes 30 s and nothing else.
        target_len: Decoder tokens of an encoder-decoder; `seq_len` by default, 128 for speech.
        images: Images of a sample of a vision-language model; 1 by default. Their tokens are part of `seq_len`.
        image_size: Edge of these images in pixels; by default what the model was made for.
        freeze_vision: Train all but the part that sees the images.
        global_batch: Samples per optimizer step, the same in every trial; 64 by default, 8 on the CPU; with 'any' it
            is the micro-batch times the number of devices.
        baseline: JSON file of TrainingArguments to compare with; the Trainer's defaults otherwise.
        allow: How much may change: 'exact', 'numerics', 'optimizer' or 'method'.
        effort: 'quick', 'standard' or 'thorough'.
        fix: Values of knobs that every configuration has, the baseline too: ``{"precision": "bf16"}``, or as text
            "precision=bf16,micro-batch=8". Knobs have the names that tables show, or those of TrainingArguments.
        only: Knobs to search, such as ``["optim", "micro-batch"]``; the others stay as in the baseline.
        space: A built-in search space or a YAML file.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        devices: Number of devices of the same kind that each training is spread over, or 'all'; 1 by default. On the
            CPU it is a number of processes.
        memory: Device memory that training may take, in bytes or as '24GiB'; by default what is free, less a margin.
        wait: Wait up to a minute, and up to a tenth of `max_time`, for a machine that other processes leave quiet; if
            they still take more than half of it, nothing is measured, and the verdict is "couldn't tell".
        max_trials: Most trials of the search, finals and checks not counted.
        max_time: Time limit of the whole search, in seconds or as '10m'.
        train_steps: Optimizer steps of your run, whose total time is then minimised: compilation pays only in a long
            run. By default the throughput of the steady state is maximised.
        train_tokens: Length of your run in tokens instead of steps, such as "20B".
        check_loss: Optimizer steps over which the winner's losses are compared with the baseline's before it is called
            the winner; 0 for none; by default 20, none for 'quick', and only where that takes little of the time.
        run_dir: Where everything is kept; ``runs/<model>-<time>`` by default.
        seed: Seed of weights, data and the search.
        revision: Revision of a hub id.
        trust_remote_code: Run the model's own code.
        record: Keep the trials for later searches, and use what earlier ones kept.
        report_to: Trackers that receive each trial and the answer: 'tensorboard', 'wandb', 'mlflow' ...
        workers: Concurrent trials; by default one, on a cluster one for each GPU, or for each node without GPUs.
        engine: 'local', or 'ray' to run trials on the nodes of a Ray cluster.
        address: Address of the cluster; by default `RAY_ADDRESS`, or a cluster that is started on this machine.
        kind: Part of the name of the device to use in a mixed cluster; by default the device that most nodes have.
        output: File that the answer is written to as well, also if the search is interrupted or resumed.
        quiet: Report no progress. Without an observer, progress is logged (logger `autotune`, level INFO) if logging is
            set up for that, and otherwise shown on stderr if that is a terminal or a notebook.
        observer: Receives each :data:`autotune.values.events.Event` in place of the log or stderr.

    Raises:
        InputError: An argument can't be used.
        MachineError: The device isn't present.
        NothingFitsError: No configuration fits.
        InfrastructureError: Trials can't be run.
        SearchInterrupted: Ctrl-C; its `result` is the answer so far.
    """
    stopwatch = Stopwatch("planning", since=command_began.get())
    taken = fields_by_name(SearchOptions)
    asked = {name: value for name, value in locals().items() if name in taken}
    options = options_of(SearchOptions, asked | {"model": model or "", "output": wanted_file(output)})
    check_trackers(options.report_to)
    check(options)
    with user_trainer.aside(trainer), heard_by(observer, quiet=quiet) as heard:
        subject = planner.subject_of(
            options, step=step, knobs=knobs, trainer=trainer, make_trainer=make_trainer, script=script
        )
        directory = RunDirectory.create(Path(run_dir) if run_dir is not None else default_run_directory(subject.name))
        with directory, backend_of(options.fleet, directory.path, device=options.device) as backend:
            return _search(subject, directory, backend, heard, stopwatch)


@names_checked()
def preview(
    model: str = "", *, script: Sequence[str] | None = None, observer: Observer | None = None, **options: Any
) -> Preview:
    """Return what :func:`find` would try with these arguments; no trial is run, and no run directory is made.

    A script is run up to the beginning of its training. What earlier searches recorded is not looked at.

    Raises:
        InputError, MachineError, InfrastructureError: As in :func:`find`.
    """
    asked = options_of(SearchOptions, {**options, "model": model, "output": wanted_file(options.get("output"))})
    check_trackers(asked.report_to)
    check(asked)
    folder = Path(tempfile.mkdtemp(prefix="autotune-"))  # for the processes that look at the model
    try:
        with (
            heard_by(observer, quiet=False) as heard,
            RunDirectory.create(folder / "run") as directory,
            backend_of(asked.fleet, directory.path, device=asked.device) as backend,
        ):
            subject = planner.subject_of(asked, script=script)
            plan = _planned(subject, directory, backend, heard, Stopwatch("planning"))
            heard(PhaseBegan(phase=Phase.PREDICTING))
            return previewed(plan, cost_model(plan, backend.asker, directory.path, heard))
    finally:
        with contextlib.suppress(OSError):  # it stays if an error names a log in it
            folder.rmdir()


def _search(
    subject: Subject, directory: RunDirectory, backend: Backend, observer: Observer, stopwatch: Stopwatch
) -> TuningResult:
    """Plan the search and run it."""
    plan = with_files(_planned(subject, directory, backend, observer, stopwatch))
    directory.write_plan(plan)
    trust.remember(plan)
    return with_methods(conduct(plan, directory, backend, observer, stopwatch))


def _planned(
    subject: Subject, directory: RunDirectory, backend: Backend, observer: Observer, stopwatch: Stopwatch
) -> SearchPlan:
    """Describe what is tuned in a child process, and return the plan, after its notes."""
    backend.asker.launch()  # the child imports libraries while this process reads the model's config
    outline = planner.outline(subject.options, backend.allotment, subject)
    backend.asker.ends_at = stopwatch.started_at + outline.budget.max_time_s
    backend.asker.check_time()
    subject.keep(directory.path)
    here = planner.disk_notes(directory.path) if subject.options.engine == "local" else []
    for text in (*outline.notes, *here):
        observer(Note(text=text))
    stopwatch.enter("launching")
    backend.asker.start()
    stopwatch.enter("describing")
    observer(PhaseBegan(phase=Phase.LOOKING))
    description = subject.described(outline, backend.asker)
    stopwatch.enter("planning")
    plan = planner.complete(subject.settled(outline, description), description.facts, description.notes)
    plan = subject.examined(plan, backend.asker)
    for text in plan.notes[len(outline.notes) :]:
        observer(Note(text=text))
    return plan


@names_checked()
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
        NothingFitsError, InfrastructureError, SearchInterrupted: As in :func:`find`.
    """
    stopwatch = Stopwatch("planning", since=command_began.get())
    given = {"max_trials": max_trials, "max_time": max_time, **({} if effort is None else {"effort": effort})}
    limits = options_of(SearchOptions, {"model": "", **given})
    wanted = wanted_file(output)
    directory = RunDirectory.existing(Path(run_dir))
    with directory, heard_by(observer, quiet=quiet) as heard:
        before, restored = read_plan(directory.path), restore(directory.path)
        results = directory.results()
        trust.check(directory.path, before, trusted=trust_run_dir, delivers=output is None)
        plan = reopened(
            before,
            results,
            effort=None if effort is None else limits.effort,
            max_trials=limits.max_trials,
            max_time_s=limits.max_time_s,
            output=wanted,
        )
        news = changed_files(plan)
        if plan.fleet.is_single:  # with several places, `backend_of` compares the machines
            others = differences(plan.hardware, detect(plan.hardware.device))
            plan = plan.model_copy(update={"record": plan.record and not others})  # where versions decide what compares
            news += others
        plan = plan.model_copy(update={"notes": tuple(dict.fromkeys((*plan.notes, *news)))})
        for text in (*restored, *news):
            heard(Note(text=text))
        directory.write_plan(plan)
        trust.remember(plan)
        if plan.budget != before.budget:
            heard(Note(text=limits_of(plan, results)))
        with backend_of(plan.fleet, directory.path, planned=plan.hardware) as backend:
            stopwatch.enter("launching")
            backend.asker.start()
            result = conduct(plan, directory, backend, heard, stopwatch)
        if results and len(directory.results()) == len(results):
            heard(Note(text=NOTHING_RUN))
    return with_methods(result)
