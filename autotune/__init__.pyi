# Made by docs/hooks/stub.py.
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.api import preview as preview
from autotune.api import resume as resume
from autotune.errors import AutotuneError as AutotuneError
from autotune.integrations.callback import AutotuneCallback as AutotuneCallback
from autotune.planning.user_code import Knobs as Knobs
from autotune.rehearsal import rehearse as rehearse
from autotune.training.loss import normalize_loss as normalize_loss
from autotune.tuning_result import TuningResult as TuningResult
from autotune.tuning_result import load as load
from autotune.values.budget import Budget as Budget
from autotune.values.budget import Effort as Effort
from autotune.values.config import Allowance as Allowance
from autotune.values.config import Precision as Precision
from autotune.values.config import TrainConfig as TrainConfig
from autotune.values.estimate import CostEstimate as CostEstimate
from autotune.values.problem import Observer as Observer
from autotune.values.techniques import BitfitAdapter as BitfitAdapter
from autotune.values.techniques import DoraAdapter as DoraAdapter
from autotune.values.techniques import Ia3Adapter as Ia3Adapter
from autotune.values.techniques import LohaAdapter as LohaAdapter
from autotune.values.techniques import LokrAdapter as LokrAdapter
from autotune.values.techniques import LoraAdapter as LoraAdapter
from autotune.values.techniques import PTuningAdapter as PTuningAdapter
from autotune.values.techniques import PrefixAdapter as PrefixAdapter
from autotune.values.techniques import PromptAdapter as PromptAdapter
from autotune.values.techniques import RsloraAdapter as RsloraAdapter
from autotune.values.techniques import VeraAdapter as VeraAdapter
from autotune.values.workload import OwnKnob as OwnKnob
from autotune.values.workload import Workload as Workload
from autotune.version import __version__ as __version__


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
    task: str | None = None,
    seq_len: str | int | None = None,
    target_len: str | int | None = None,
    images: str | int | None = None,
    image_size: str | int | None = None,
    freeze_vision: bool = False,
    global_batch: str | int | None = None,
    recipe: str | None = None,
    prompt_len: str | int | None = None,
    completion_len: str | int | None = None,
    generations: str | int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    memory: str | int | None = None,
    data: str | Path | None = None,
    text_field: str | None = None,
    reward: str | None = None,
    baseline: str | Path | None = None,
    against: str | Path | None = None,
    allow: str = "optimizer",
    effort: str = "standard",
    fix: str | Sequence[str] | Mapping[str, Any] = (),
    only: str | Sequence[str] | Mapping[str, Any] = (),
    space: str | Path | None = None,
    max_trials: str | int | None = None,
    max_time: str | float | None = None,
    train_steps: str | int | None = None,
    train_tokens: str | float | None = None,
    check_loss: str | int | None = None,
    seed: str | int = 42,
    devices: str | int | Sequence[str | int] = (),
    nodes: str | int | None = None,
    workers: str | int | None = None,
    engine: str = "local",
    address: str | None = None,
    kind: str | None = None,
    record: bool = True,
    report_to: str | Sequence[str] | Mapping[str, Any] = (),
    output: str | Path | None = None,
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
        task: Head to train; by default that of config.json.
        seq_len: Tokens of a sample, or frames [512; CPU 64].
        target_len: Decoder tokens [as --seq-len; speech 128].
        images: Images of a sample of text [1].
        image_size: Edge of these, in pixels.
        freeze_vision: Train all but the vision part.
        global_batch: Samples per step, or 'any' [64; CPU 8].
        recipe: Post-training by TRL: sft, dpo, reward, kto, grpo, rloo.
        prompt_len: Tokens of a recipe's prompt [256; CPU 32].
        completion_len: Tokens of its completion [256; CPU 32].
        generations: Completions of a prompt, grpo and rloo [8; 2].
        revision: Revision of a hub id.
        trust_remote_code: Run the model's own code.
        device: Device of this machine: auto, cpu, cuda or cuda:N.
        memory: Device memory to stay within, such as 24GiB.
        data: JSONL, CSV, Parquet or text; default: synthetic.
        text_field: Column of --data that holds the text.
        reward: Reward function, as MODULE:FUNCTION [built in].
        baseline: JSON of your TrainingArguments to compare with.
        against: Earlier best-config.json: its winner is measured again and compared.
        allow: What may change: exact, numerics, optimizer, method.
        effort: How long to search: quick, standard, thorough.
        fix: KNOB=VALUE in every configuration and the baseline.
        only: Knobs to search; the others stay as in the baseline.
        space: Built-in search space or YAML file.
        max_trials: Trials of the search.
        max_time: Time of the whole search, such as 10m.
        train_steps: Minimise the time of a run of so many steps.
        train_tokens: Minimise the time of a run of so many tokens, as 20B.
        check_loss: Steps whose losses must agree [20; quick 0].
        seed: Seed of weights, data and the search.
        devices: Spread each training over so many; several, or all, to compare, the baseline's first [1].
        nodes: Machines of a Ray cluster that --devices are on [1].
        workers: Trials at once, each on a GPU [1].
        engine: What runs trials: local, or ray for a cluster.
        address: Address of the Ray cluster [RAY_ADDRESS, else one here].
        kind: Part of a device's name in a mixed cluster [most nodes].
        record: Use, and add to, `autotune history`.
        report_to: Tell tensorboard, wandb, mlflow of each trial.
        output: Write the answer here too.

    Raises:
        InputError: An argument can't be used.
        MachineError: The device isn't present.
        NothingFitsError, NothingPassedError: No configuration fits, or each that fits failed a check.
        InfrastructureError: Trials can't be run.
        SearchInterrupted: Ctrl-C; its `result` is the answer so far.
    """


def estimate(
    model: str | None = None,
    *,
    config: TrainConfig,
    workload: Workload | None = None,
    task: str | None = None,
    seq_len: str | int | None = None,
    target_len: str | int | None = None,
    images: str | int | None = None,
    image_size: str | int | None = None,
    freeze_vision: bool = False,
    global_batch: str | int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    gpu: str | None = None,
    nodes: str | int | None = None,
    eval_batch: str | int | None = None,
    eval_samples: str | int | None = None,
) -> CostEstimate:
    """Return the predicted memory and time of a configuration, whether or not it fits; nothing is run.

    Args:
        model: A name of the catalogue, a directory with `config.json`, or a hub id.
        config: The configuration.
        workload: What is trained, instead of `model` and the options that describe it.
        task: Head to train; by default that of config.json.
        seq_len: Tokens of a sample, or frames [512; CPU 64].
        target_len: Decoder tokens [as --seq-len; speech 128].
        images: Images of a sample of text [1].
        image_size: Edge of these, in pixels.
        freeze_vision: Train all but the vision part.
        global_batch: Samples per step, or 'any' [64; CPU 8].
        revision: Revision of a hub id.
        trust_remote_code: Run the model's own code.
        device: Device of this machine: auto, cpu, cuda or cuda:N.
        gpu: Device of `autotune gpus` [this machine's]; the command takes all.
        nodes: Machines that --devices are on [of 8 each].
        eval_batch: Batch of an evaluation, which then counts [with --eval-samples 8].
        eval_samples: Samples whose logits compute_metrics keeps.

    Raises:
        InputError: An argument can't be used, or the device or the model can't run the configuration.
        MachineError: The device isn't present.
    """
