"""`AutotuneCallback` in real trainings of a tiny model, by a clock of the test's own, and what it says in the end."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from factories import StepClock
from finished_searches import make_search
from own_trainings import quiet_arguments
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from autotune import AutotuneCallback
from autotune.errors import InputError
from autotune.execution import noise
from autotune.exports import targets
from autotune.integrations.callback import _PACKAGES, DISCARDED_STEPS, FILE_NAME, Production, Promise, differences
from autotune.tuning_result import TuningResult
from autotune.units import GIB
from autotune.values.trial import Interval, Memory


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> TuningResult:
    _, found = make_search(tmp_path_factory.mktemp("search") / "run")
    return found


class Texts(torch.utils.data.Dataset):
    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int):
        ids = torch.arange(8) + index % 16
        return {"input_ids": ids, "labels": ids}


def trained(callback: AutotuneCallback, folder, *, samples: int = 64, **arguments) -> Trainer:
    """Train a tiny model, two samples a step."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    usual = {"per_device_train_batch_size": 2, "max_steps": 12, "logging_steps": 4}
    args, data = quiet_arguments(folder, **{**usual, **arguments}), Texts(samples)
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=Texts(4), callbacks=[callback])
    trainer.train()
    return trainer


def test_a_training_says_at_its_end_how_fast_it_was(result, tmp_path, capfd):
    path = tmp_path / "best-config.json"
    result.save(path)
    callback = AutotuneCallback(path)
    saved = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 6}
    trained(callback, tmp_path, disable_tqdm=False, **saved)
    report = callback.report
    assert report.steps == 12 - DISCARDED_STEPS - 1  # and the last
    assert report.samples_per_step == 2
    assert report.samples_per_second > 0
    assert report.tokens_per_second == pytest.approx(128 * report.samples_per_second)
    assert 0 <= report.data_wait_share < 1
    assert report.memory.resident_bytes > 0
    assert "samples a step: 2 (promised 16)" in report.reasons
    assert any(reason.startswith("per_device_train_batch_size 2 (promised") for reason in report.reasons)
    err = capfd.readouterr().err
    assert "12/12" in err, "the Trainer's progress bar"
    assert [line for line in err.splitlines() if "autotune: " in line] == [f"autotune: {report}"]
    trained(AutotuneCallback(path), tmp_path, max_steps=1)
    first, second = map(Production.model_validate_json, (tmp_path / FILE_NAME).read_text().splitlines())
    assert (first, second.samples_per_second) == (report, None)


def test_steps_that_are_not_whole_dont_count(result, tmp_path):
    """Five batches an epoch, two a step: the third step of an epoch has one; the first and last don't count either."""
    callback = AutotuneCallback(result)
    trained(callback, tmp_path, samples=10, gradient_accumulation_steps=2, max_steps=9)
    assert callback.report.steps == 2  # the second of the second and of the third epoch
    assert callback.report.samples_per_step == 4


def test_the_promised_arguments_and_machine_give_no_reason(result, tmp_path):
    """The arguments of the answer itself, as a user takes them from it."""
    arguments = result.training_arguments(str(tmp_path), max_steps=1)
    callback = AutotuneCallback(result)
    callback.on_train_begin(arguments, None, None)
    report = callback._production(arguments, None)
    elsewhere = ("device:", "cores:", *_PACKAGES, "other", "the hypervisor")
    assert [reason for reason in report.reasons if not reason.startswith(elsewhere)] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_other_ranks_of_a_training_are_no_other_processes(ranks, result, monkeypatch):
    seen, watch = [], noise.watch
    monkeypatch.setattr(noise, "watch", lambda device, **given: seen.append(given) or watch(device, **given))
    arguments = SimpleNamespace(device=torch.device("cpu"), world_size=ranks)
    AutotuneCallback(result).on_train_begin(arguments, None, None)
    assert seen == [{"ranks": ranks > 1}]


def test_a_rate_that_was_measured_once_is_promised_as_it_is_shown(result):
    once = result.model_copy(update={"best": result.best.model_copy(update={"correction": 0.5, "confirmed": False})})
    whole, half = (AutotuneCallback(each)._promise for each in (result, once))
    assert half.samples_per_second == pytest.approx(whole.samples_per_second / 2)
    assert half.interval.high == pytest.approx(whole.interval.high / 2)
    script, exact = (targets.draft(each, "python").text for each in (once, result))
    assert f"MEASURED = {half.samples_per_second:.3f}".rstrip("0") in script
    assert "about " in script.partition("samples/s")[0]
    assert f"MEASURED = {whole.samples_per_second:.3f}".rstrip("0") in exact


def test_an_answer_without_measurement_or_file_is_refused(result, tmp_path):
    nothing = result.model_copy(update={"best": result.best.model_copy(update={"measurement": None})})
    with pytest.raises(InputError, match="no measurement"):
        AutotuneCallback(nothing)
    with pytest.raises(InputError, match=r"none\.json: No such file"):
        AutotuneCallback(tmp_path / "none.json")


class Course:
    """The Trainer's calls, each part of a step taking a second or more."""

    def __init__(self, result: TuningResult) -> None:
        self.clock = StepClock()
        self.callback = AutotuneCallback(result, clock=self.clock)
        self.args = SimpleNamespace(device=torch.device("cpu"), gradient_accumulation_steps=1, train_batch_size=8)
        self.args.world_size = 1
        self.callback.on_train_begin(self.args, None, None)
        self.callback.on_epoch_begin(self.args, None, None)

    def step(self, *, data: float = 1.0, compute: float = 3.0, then: str = "", takes: float = 0.0) -> None:
        self.clock.now += data
        self.callback.on_step_begin(self.args, None, None)
        self.clock.now += compute
        self.callback.on_step_end(self.args, None, None)
        if then:
            self.clock.now += takes
            getattr(self.callback, then)(self.args, None, None)

    def seen(self) -> tuple[int, float, float]:
        self.callback.on_epoch_end(self.args, None, None)
        self.callback._read()
        return self.callback._steps, self.callback._total_s, self.callback._waited_s


@pytest.mark.parametrize("degree", ["SP", "CP", "TP"])
def test_ranks_that_share_samples_count_once(result, tmp_path, monkeypatch, degree):
    arguments = result.training_arguments(str(tmp_path), max_steps=1)
    monkeypatch.setattr(type(arguments), "world_size", 4)
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{degree}_SIZE", "2")
    model = torch.nn.Linear(1, 1)
    model.tp_size = 2 if degree == "TP" else None
    callback = AutotuneCallback(result)
    callback.on_train_begin(arguments, None, None)
    one = arguments.train_batch_size * arguments.gradient_accumulation_steps
    assert callback._production(arguments, model).samples_per_step == 2 * one


@pytest.mark.parametrize("then", ["", "on_log", "on_evaluate", "on_save"])
def test_a_step_counts_with_the_wait_for_its_data_and_without_what_goes_on_between_steps(result, then):
    course = Course(result)
    for number in range(DISCARDED_STEPS + 5):
        course.step(then=then if number == DISCARDED_STEPS + 1 else "", takes=100.0)
    assert course.seen() == (4, 16.0, 4.0)  # the last may have been short


def test_the_first_step_of_an_epoch_doesnt_count(result):
    course = Course(result)
    for _ in range(DISCARDED_STEPS + 2):
        course.step()
    course.callback.on_epoch_end(course.args, None, None)
    course.callback.on_epoch_begin(course.args, None, None)
    for data in (50.0, 1.0, 1.0):
        course.step(data=data)
    assert course.seen() == (2, 8.0, 2.0)


def make_promise(**fields):
    usual = {"interval": Interval(low=95.0, high=105.0), "memory": Memory(reserved_bytes=3 * GIB)}
    return Promise(**{"samples_per_second": 100.0, **usual, **fields})


def make_production(rate: float | None, **fields):
    usual = {
        "when": "2026-01-01T08:00:00+00:00", "model": "tiny", "config_id": "abc", "promise": make_promise(),
        "steps": 40, "samples_per_step": 16, "samples_per_second": rate, "memory": Memory(),
    }  # fmt: skip
    return Production(**{**usual, **fields})


def arguments_of(result, **changes):
    """TrainingArguments as a dataclass with the promised values."""
    names = {**result.arguments.training_arguments, "gradient_checkpointing": False, "report_to": "none", **changes}
    made = dataclasses.make_dataclass("Arguments", [(n, object, dataclasses.field(default=None)) for n in names])
    return made(**names)


REASONS = ("optim sgd (promised adamw_torch)", "waiting for data: 30%")
NO_REASON = "no reason was seen (samples of other lengths? another load of the machine?)"
SEEN, STEPS, PROMISED = "; ".join(REASONS), "samples/s over 40 steps,", "100 (95 to 105)"
ENDLESS = make_promise(interval=Interval(low=0.0, high=math.inf))


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (make_production(97.0, reasons=REASONS), f"97 {STEPS} as promised: {PROMISED}"),
        (make_production(97.0, tokens_per_second=49_664.0, mfu=0.415),
         f"97 samples/s over 40 steps (49,664 tokens/s, 42% MFU if samples are as long as the search's), as promised: "
         f"{PROMISED}"),
        (make_production(80.0, reasons=REASONS), f"80 {STEPS} 0.80 times the promised {PROMISED}: {SEEN}"),
        (make_production(80.0), f"80 {STEPS} 0.80 times the promised {PROMISED}: {NO_REASON}"),
        (make_production(130.0, reasons=REASONS), f"130 {STEPS} 1.30 times the promised {PROMISED}"),
        (make_production(None, steps=0), f"too few steps to tell the throughput; promised: {PROMISED} samples/s"),
        (make_production(10.0, promise=ENDLESS), f"10 {STEPS} which can't be told from the promised about 100"),
        (make_production(100.0, memory=Memory(reserved_bytes=4 * GIB)), f"100 {STEPS} as promised: {PROMISED}; "
         "peak 4.00 GiB reserved (promised 3.00 GiB)"),
        (make_production(100.0, memory=Memory(resident_bytes=GIB)), f"100 {STEPS} as promised: {PROMISED}"),
    ],
    ids=["within", "in tokens", "below", "no reason", "above", "too few", "endless", "device", "host"],
)  # fmt: skip
def test_its_line(seen, said):
    assert str(seen) == said


def a_model(dtype: str = "torch.float32", kernel: str = "sdpa", **fields):
    weights = SimpleNamespace(dtype=dtype)
    config = SimpleNamespace(_attn_implementation=kernel)
    return SimpleNamespace(config=config, parameters=lambda: iter([weights]), **fields)


DIFFERENCES = {
    "none": ({}, []),
    "arguments that cost time, and others": (
        {"arguments": {"optim": "sgd", "bf16": False, "learning_rate": 1.0, "per_device_eval_batch_size": 99}},
        ["bf16 False (promised True)", "optim sgd (promised adamw_torch)"],
    ),
    "one that wasn't promised": ({"arguments": {"torch_compile": True}}, ["torch_compile True (promised None)"]),
    "one of two names": ({"arguments": {"gradient_checkpointing": True, "activation_checkpointing": True}},
                         ["activation_checkpointing True (promised False)"]),
    "defaults of transformers beside those of FSDP": (
        {"promised": {"fsdp_config": {"version": 2}}, "arguments": {"fsdp_config": {"version": 2, "xla": False}}}, [],
    ),
    "another of FSDP": ({"promised": {"fsdp_config": {"version": 2}}, "arguments": {"fsdp_config": {"version": 1}}},
                        ["fsdp_config {'version': 1} (promised {'version': 2})"]),
    "dtype": ({"model": a_model("torch.bfloat16")}, ["weights: bfloat16 (promised float32)"]),
    "kernel": ({"model": a_model(kernel="eager")}, ["attention: eager (promised sdpa)"]),
    "an adapter": ({"model": a_model(peft_config={})}, ["adapter: True (promised False)"]),
    "no adapter": ({"adapter": {"peft_type": "LORA"}}, ["adapter: False (promised True)"]),
    "biases alone": ({"adapter": {"peft_type": "BITFIT"}}, []),
    "no model": ({"model": None}, []),
    "device": ({"machine": {"name": "another", "cores": 99}}, ["device: another (promised a CPU)"]),
    "cores": ({"machine": {"cores": 99}}, ["cores: 99 (promised 2)"]),
    "version": ({"machine": {"versions": {"torch": "3.0"}}}, ["torch 3.0 (promised 2.13.0)"]),
    "samples": ({"samples_per_step": 32}, ["samples a step: 32 (promised 16)"]),
    "a short wait": ({"data_wait_share": 0.02}, []),
    "a wait": ({"data_wait_share": 0.3}, ["waiting for data: 30% of a step (promised 0%)"]),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_differs_from_the_promise_is_named(result, change, said):
    arguments = {**result.arguments.training_arguments, **change.get("promised", {})}
    own = result.arguments.model_copy(update={"adapter": change.get("adapter"), "training_arguments": arguments})
    promised = result.model_copy(update={"arguments": own})
    found = differences(
        promised, arguments_of(result, **change.get("arguments", {})), change.get("model", a_model()),
        result.hardware.model_copy(update=change.get("machine", {})),
        samples_per_step=change.get("samples_per_step", 16), data_wait_share=change.get("data_wait_share"),
    )  # fmt: skip
    assert found == said
