"""`find` and `resume`: a search from the user's words to the answer, from Python or from the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from autotune.integrations.trackers import check as check_trackers
from autotune.output.default_observer import heard_by
from autotune.planning import planner, user_trainer
from autotune.planning.options import SearchOptions, fields_by_name, options_of
from autotune.planning.reopen import NOTHING_RUN, limits_of, reopened
from autotune.planning.user_loop import Knobs
from autotune.planning.workload import Subject
from autotune.search.run import Backend, backend_of, check, conduct, wanted_file
from autotune.storage import trust
from autotune.storage.run_directory import RunDirectory, default_run_directory, read_plan
from autotune.tuning_result import TuningResult, with_methods
from autotune.values.budget import Effort
from autotune.values.events import Note, Observer, Phase, PhaseBegan
from autotune.values.knob import Allowance
from autotune.values.time_spent import Stopwatch


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
    seq_len: int | None = None,
    target_len: int | None = None,
    global_batch: int | Literal["any"] | None = None,
    baseline: str | Path | None = None,
    allow: Allowance | str = Allowance.OPTIMIZER,
    effort: Effort | str = Effort.STANDARD,
    space: str | Path | None = None,
    device: str = "auto",
    devices: int | Literal["all"] | None = None,
    memory: str | int | None = None,
    max_trials: int | None = None,
    max_time: str | float | None = None,
    exhaustive: bool = False,
    repeat: int = 1,
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
            argument `accumulation_steps` if it has one, sets training up and returns a function that does one optimizer
            step, and may return its loss. It raises ValueError for what it can't do. With `model` as well, memory and
            time are predicted; without, the search goes by trials alone.
        knobs: The fields of :class:`TrainConfig` that `step` honours, each with the values to try if you like:
            ``["per_device_train_batch_size"]`` or ``{"precision": ["fp32", "bf16"]}``; or a `space` says it.
        trainer: A `transformers.Trainer` of your own, with its model, data, loss and arguments, which are the baseline;
            it is made anew in each trial and is left as it is.
        make_trainer: The same as a function that makes it, for what can't be pickled or is too large to be.
        script: The same as a command line that calls `Trainer.train`, such as ``["python", "train.py", "--bf16"]``.
        task: The head: 'causal-lm', 'seq2seq-lm', 'masked-lm', 'sequence-classification',
            'image-classification', 'speech-ctc', 'speech-seq2seq' or 'audio-classification';
            by default the usual one of the architecture.
        data: JSONL, CSV, Parquet or text whose lengths are trained with; by default synthetic samples.
        text_field: The column of `data` that holds the text.
        seq_len: Tokens of a sample, or frames of sound (20 ms of wav2vec 2.0); 512 by default, 128 on the CPU. Whisper
            takes 30 s and nothing else.
        target_len: Decoder tokens of an encoder-decoder; `seq_len` by default, 128 for speech.
        global_batch: Samples per optimizer step, held fixed; 64 by default, 16 on the CPU; 'any' sets it free.
        baseline: JSON file of TrainingArguments to compare with; the Trainer's defaults otherwise.
        allow: How much may change: 'exact', 'numerics', 'optimizer' or 'method'.
        effort: 'quick', 'standard' or 'thorough'.
        space: A built-in search space or a YAML file.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        devices: Over how many like devices each training is spread, or 'all'; 1 by default. On the CPU: processes.
        memory: Device memory that training may take: bytes or such as '24GiB'; what is free now less a margin.
        max_trials: Trials of the search.
        max_time: The whole search: seconds or such as '10m'.
        exhaustive: Measure every legal point instead of searching, and write ``table.jsonl`` in the run directory;
            without limits of trials and time unless they are given.
        repeat: How often each point is measured then, in rounds.
        train_steps: Length of the run whose time is to be shortest, in optimizer steps: compilation pays only in a long
            one. By default the steady state's throughput counts.
        train_tokens: The same in tokens, such as "20B".
        check_loss: Optimizer steps over which the winner's losses are compared with the baseline's before it is called
            the winner; 0 for none; by default 20, none for 'quick', and only where that takes little of the time.
        run_dir: Where everything is kept; ``runs/<model>-<time>`` by default.
        seed: Of weights, data and the search.
        revision: Of a hub id.
        trust_remote_code: Run the model's own code.
        record: Keep the trials for later searches, and use what earlier ones kept.
        report_to: Trackers that are told of each trial and of the answer: 'tensorboard', 'wandb', 'mlflow'.
        workers: Trials at once: by default one; on a cluster one for each GPU, or for each node without.
        engine: 'local', or 'ray': the nodes of a Ray cluster.
        address: Of the cluster; by default `RAY_ADDRESS`, or one that is started on this machine.
        kind: Of the cluster's devices, by a part of their name; by default what most nodes have.
        output: File that the answer is written to as well, also when the search is stopped or gone on with.
        quiet: Tell nothing while it searches. Without an observer, what happens is logged (logger `autotune`, level
            INFO) where logging is set up for that, and else shown on stderr, if that is a terminal or a notebook.
        observer: Called with each :data:`autotune.values.events.Event` instead.

    Raises:
        InputError: An argument can't be used.
        MachineError: The device isn't there.
        NothingFitsError: No configuration fits.
        InfrastructureError: Trials can't be run.
        SearchInterrupted: Ctrl-C; the best so far is its `result`.
    """
    taken = fields_by_name(SearchOptions)
    asked = {name: value for name, value in locals().items() if name in taken}
    options = options_of(SearchOptions, asked | {"model": model or "", "output": wanted_file(output)})
    check_trackers(options.report_to)
    check(options)
    with user_trainer.aside(trainer), heard_by(observer, quiet=quiet) as heard:
        subject = planner.subject_of(
            options, step=step, knobs=knobs, trainer=trainer, make_trainer=make_trainer, script=script
        )
        stopwatch = Stopwatch("planning")
        directory = RunDirectory.create(Path(run_dir) if run_dir is not None else default_run_directory(subject.name))
        with directory, backend_of(options.fleet, directory.path, device=options.device) as backend:
            return _search(subject, directory, backend, heard, stopwatch)


def _search(
    subject: Subject, directory: RunDirectory, backend: Backend, observer: Observer, stopwatch: Stopwatch
) -> TuningResult:
    """Look at what is tuned, plan the search of it and run that."""
    backend.asker.begin()  # it imports libraries while the model's own may be imported here, to read its config
    outline = planner.outline(subject.options, backend.allotment, subject)
    subject.keep(directory.path)
    here = planner.machine_notes(outline.hardware, directory.path) if subject.options.engine == "local" else []
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
    directory.write_plan(plan)
    trust.remember(plan)
    for text in plan.notes[len(outline.notes) :]:
        observer(Note(text=text))
    return with_methods(conduct(plan, directory, backend, observer, stopwatch))


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
    """Go on with the search in `run_dir`; nothing that was measured is measured again.

    Limits that are given take the place of those it has had, from now on. They are of the whole search, what it has
    spent included: with more of them, a search that had come to its end searches on.

    Args:
        run_dir: Of the search.
        max_time: The whole search: seconds or such as '10m'.
        max_trials: Trials of the whole search.
        effort: 'quick', 'standard' or 'thorough': with all its limits, but for those that are given with it.
        output: As of :func:`find`; by default the file that was named there.
        trust_run_dir: Run what `run_dir` says, also where it was not begun by this user on this machine: its scripts,
            pickled functions and models' own code. What that is is said, and refused, otherwise.
        quiet: As of :func:`find`.
        observer: As of :func:`find`.

    Raises:
        RunDirectoryError: There is no search in `run_dir`, one is running, or it would run what isn't trusted.
        InputError: An argument can't be used.
        NothingFitsError, InfrastructureError, SearchInterrupted: As `find`.
    """
    given = {"max_trials": max_trials, "max_time": max_time, **({} if effort is None else {"effort": effort})}
    limits = options_of(SearchOptions, {"model": "", **given})
    wanted = wanted_file(output)
    stopwatch = Stopwatch("planning")
    directory = RunDirectory.existing(Path(run_dir))
    with directory, heard_by(observer, quiet=quiet) as heard:
        before, results = read_plan(directory.path), directory.results()
        trust.check(directory.path, before, trusted=trust_run_dir, delivers=output is None)
        plan = reopened(
            before,
            results,
            effort=None if effort is None else limits.effort,
            max_trials=limits.max_trials,
            max_time_s=limits.max_time_s,
            output=wanted,
        )
        directory.write_plan(plan)
        trust.remember(plan)
        if plan.budget != before.budget:
            heard(Note(text=limits_of(plan, results)))
        with backend_of(plan.fleet, directory.path, planned=plan.hardware) as backend:
            stopwatch.enter("launching")
            backend.asker.start()
            result = conduct(plan, directory, backend, heard, stopwatch)
        if len(directory.results()) == len(results):
            heard(Note(text=NOTHING_RUN))
    return with_methods(result)
