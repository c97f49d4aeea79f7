"""Soaks and loss runs: as real trials of a tiny Llama, with a hostile disk, and with metrics of real Trainers."""

import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from benches import LONG
from own_trainings import quiet_arguments
from torch import nn
from transformers import Trainer, TrainingArguments

from autotune.execution import checking
from autotune.execution.checking import CheckError, Reading
from autotune.execution.gradients import randomness_off
from autotune.execution.outcome import is_out_of_memory
from autotune.training.resolve import resolve
from autotune.values.budget import LossTask, SoakTask
from autotune.values.trial import Memory, TrialStatus

MIB = 1 << 20


def test_a_soak_evaluates_and_saves_weights_and_states_and_leaves_no_file(bench):
    result = bench.check(SoakTask(eval_batch_sizes=(16, 8)), config={"dataloader_num_workers": 1})
    assert result.status is TrialStatus.COMPLETED, result.outcome
    soaked = result.outcome.soaked
    assert (soaked.eval_batch_size, soaked.not_saved) == (16, None)
    states = 3 * 4 * 139_584  # weights and AdamW's two states, fp32
    assert states < soaked.checkpoint_bytes < 1.1 * states
    assert not list(bench.directory(result).rglob("*.safetensors"))
    assert not (bench.directory(result) / "trainer").exists()


def test_an_evaluation_batch_that_the_limit_had_room_for_gives_way_too(bench, wide_llama):
    """A little more than the budget: the limit alone lets it pass."""
    workload = {"model": resolve(str(wide_llama)), "sequence_length": 64}
    fields = {"workload": workload, "config": {"per_device_train_batch_size": 1}}
    roomy = bench.checked(SoakTask(eval_batch_sizes=(16,)), limits={"memory_bytes": 4000 * MIB}, **fields)
    little_less = roomy.memory.peak_bytes - 8 * MIB
    found = bench.checked(SoakTask(eval_batch_sizes=(16, 2)), limits={"memory_bytes": little_less}, **fields)
    assert found.soaked.eval_batch_size == 2
    assert found.memory.peak_bytes < little_less
    result = bench.check(SoakTask(eval_batch_sizes=(64,)), limits={"memory_bytes": 600 * MIB}, **fields)
    assert result.status is TrialStatus.OUT_OF_MEMORY
    assert result.outcome.cause.startswith("while evaluating with a batch of 64: ")


@pytest.mark.parametrize(
    ("data", "is_known"),
    [(None, False), ([{"x": torch.ones(1)}, {"x": torch.ones(2)}], False), ([{"x": torch.ones(2)}] * 2, True)],
    ids=["none", "ragged", "a column that forward doesn't take"],
)
def test_the_spread_by_dropout_is_of_batches_as_the_loader_makes_them(data, is_known, tmp_path):
    class Own(Trainer):
        def compute_loss(self, model, inputs, **more):
            return model(inputs["x"]).sum()

    args = quiet_arguments(tmp_path, per_device_train_batch_size=2)
    trainer = Own(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), args)
    trainer.callback_handler.train_dataloader = SimpleNamespace(dataset=data, collate_fn=trainer.data_collator)
    spread = checking._dropout_spread(LossTask(steps=1, pass_steps=1, seed=0), trainer)
    assert spread > 0 if is_known else spread is None


class Device:
    """A trainer and its guard: training peaked at 50, evaluating takes four a sample, and there is room for 70."""

    def __init__(self):
        self.args = SimpleNamespace(dataloader_persistent_workers=True, per_device_eval_batch_size=None)
        self._peak, self._known, self.check = 50, 0, lambda: None

    def evaluate(self):
        needed = 4 * self.args.per_device_eval_batch_size
        self._peak = max(self._peak, min(needed, 70))
        if needed > 70:
            raise MemoryError

    def pop_callback(self, kind):
        return SimpleNamespace(bytes=1, not_saved=None)

    def peak(self):
        return Memory(device_bytes=max(self._peak, self._known))

    def begin_anew(self, known):
        self._known, self._peak = known.peak_bytes, 0


@pytest.mark.parametrize(
    ("sizes", "fits", "peak"),
    [
        ((16, 8), 16, 64),
        ((32, 15, 8), 15, 60),  # of what fitted, and not of the attempt that failed, which had reached 70
        ((32, 8), 8, 50),  # of training
    ],
)
def test_a_soak_peaks_in_training_or_in_the_evaluation_that_fitted(sizes, fits, peak):
    device = Device()
    found = checking.findings(SoakTask(eval_batch_sizes=sizes), device, Reading(range), device)
    assert (found["soaked"].eval_batch_size, found["memory"].device_bytes) == (fits, peak)


OF_THE_SCHEDULE = [
    {"checkpointing": "full"},
    {"attn_implementation": "eager"},
    {"dataloader_num_workers": 1},
    {"optim": "adamw_torch"},
]


@pytest.mark.parametrize(
    "config",
    [{"per_device_train_batch_size": 1}, *(pytest.param(each, marks=pytest.mark.slow) for each in OF_THE_SCHEDULE)],
    ids=str,
)
def test_a_loss_run_gives_the_loss_of_each_step_however_it_is_scheduled(bench, config):
    task = LossTask(steps=10, pass_steps=2, seed=1)
    same = {"workload": {"global_batch_size": 4}, "limits": LONG}
    configs = ({"per_device_train_batch_size": 4, **more} for more in ({}, config))
    whole, other = (bench.checked(task, config=each, **same) for each in configs)
    assert other.accumulation_steps == 4 // config.get("per_device_train_batch_size", 4)
    assert len(whole.curve.losses) == 10
    assert other.curve.losses == pytest.approx(whole.curve.losses, rel=1e-5)
    first, last = whole.curve.losses[:2], whole.curve.losses[-2:]
    assert all(b < a for a, b in zip(first, last, strict=True)), "the same samples come again, and are learnt"
    assert whole.curve.dropout_spread == 0.0


@pytest.fixture
def trainer(tmp_path):
    """The part of a Trainer that saving looks at; its optimizer's states take 1 MiB."""
    optimizer = SimpleNamespace(state={0: {"exp_avg": torch.zeros(1 << 18), "step": 3}})
    args, callbacks = SimpleNamespace(output_dir=str(tmp_path / "trainer")), []
    model = torch.nn.Linear(10, 10, bias=False)
    return SimpleNamespace(
        model=model, optimizer=optimizer, args=args, callbacks=callbacks, add_callback=callbacks.append
    )


def last_step():
    return SimpleNamespace(should_training_stop=True, should_save=False)


def test_a_disk_without_room_for_the_checkpoint_is_told_and_spared(trainer, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=512 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    saver, asked = checking.CheckpointSaver(trainer), last_step()
    saver.on_step_end(trainer.args, None, asked)
    assert not asked.should_save
    assert saver.not_saved == "no checkpoint was saved: it takes 1 MiB, and 512 MiB of disk are free"
    assert saver.bytes is None


@pytest.mark.parametrize(("saving", "error"), [(True, CheckError), (False, RuntimeError)])
def test_an_error_while_saving_says_so_and_is_still_one_of_memory(trainer, saving, error):
    def soak():
        with checking.around_training(SoakTask(eval_batch_sizes=(1,)), trainer, checking.Reading()):
            if saving:
                trainer.callbacks[0].on_step_end(trainer.args, None, last_step())
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(error, match="while saving a checkpoint: " if saving else "^Default") as raised:
        soak()
    assert is_out_of_memory(raised.value)


SMALL = {"vocab_size": 32, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
RANDOM_MODELS = {
    "gpt2": {"vocab_size": 32, "n_layer": 1, "n_embd": 16, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1},
    "bert": {**SMALL, "num_attention_heads": 2, "is_decoder": True},
    "opt": {"vocab_size": 32, "num_hidden_layers": 1, "hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 2,
            "word_embed_proj_dim": 16, "attention_dropout": 0.2, "layerdrop": 0.3},
    "llama": {**SMALL, "num_attention_heads": 2, "attention_dropout": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", RANDOM_MODELS)
def test_randomness_is_off_while_entered_and_on_again_afterwards(kind, attention):
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**RANDOM_MODELS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    for parameter in model.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    ids, before = torch.arange(12).reshape(2, 6), model.config.to_dict()

    def varies() -> bool:
        with torch.no_grad():
            return len({float(model(input_ids=ids, labels=ids).loss) for _ in range(4)}) > 1

    assert varies()
    with randomness_off(model) as is_random:
        assert is_random
        assert not varies()
        with randomness_off(model) as is_still_random:
            assert not is_still_random
    assert varies()
    assert model.config.to_dict() == before


ROWS = [{"features": torch.full((4,), float(n)), "labels": n % 2} for n in range(30)]


class Net(nn.Module):
    """Counts the batches that it computes."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, features, labels=None):
        self.calls += 1
        logits = self.out(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture
def make(tmp_path):

    def made(metrics=lambda predicted: {}, **fields):
        names = {"eval_accumulation_steps", "prediction_loss_only", "dataloader_drop_last"} & fields.keys()
        arguments = {name: fields.pop(name) for name in names}
        args = quiet_arguments(tmp_path, **arguments)
        return Trainer(Net(), args, eval_dataset=ROWS, compute_metrics=metrics, **fields)

    return made


def check_evaluation(sizes, trainer, kept=30, guard=None):
    reading = Reading(lambda samples: [ROWS[n % len(ROWS)] for n in range(samples)], kept)
    return checking.evaluated(sizes, trainer, reading, guard or Mock())


@pytest.mark.parametrize(
    ("fields", "shape", "found"),
    [
        ({}, (30, 2), {"predictions_bytes": 30 * 2 * 4}),
        # the last batch is evaluated though a trial drops it
        ({"dataloader_drop_last": True, "eval_accumulation_steps": 3}, (30, 2),
         {"predictions_bytes": 30 * 2 * 4, "eval_accumulation_steps": 3}),
        ({"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}, (30,),
         {"predictions_bytes": 30 * 8}),
    ],
    ids=["all", "to the host", "as small as the user makes them"],
)  # fmt: skip
def test_metrics_get_predictions_of_all_samples_of_which_the_model_computes_two_batches(make, fields, shape, found):
    seen, trainer = [], make(**fields)
    trainer.compute_metrics = lambda predicted: seen.append((predicted.predictions.shape, len(predicted[1]))) or {}
    assert check_evaluation((4, 2), trainer) == {"eval_batch_size": 4, "predicted_samples": 30, **found}
    assert seen == [(shape, 30)]
    assert trainer.model.calls == 2


def test_each_of_several_data_sets_is_evaluated_with_its_own_predictions(make):
    trainer = make(metrics=lambda predicted: seen.append(len(predicted[1])) or {})
    seen = []
    reading = Reading(lambda samples: {"few": ROWS[:10], "many": [*ROWS, *ROWS][:samples], "one": ROWS[:1]}, 30)
    found = checking.evaluated((4,), trainer, reading, Mock())
    assert found == {"eval_batch_size": 4, "predicted_samples": 30, "predictions_bytes": 30 * 2 * 4}
    assert (seen, trainer.model.calls) == ([10, 30, 1], 2 + 2 + 1)


def test_without_metrics_nothing_is_kept_and_two_batches_are_read(make):
    trainer = make(metrics=None)
    kept = [checking.keeps_predictions(each) for each in (trainer, make(prediction_loss_only=True), make())]
    assert kept == [False, False, True]
    trainer.evaluate = lambda: Trainer.evaluate(trainer)  # one of the code's own, which takes no data
    assert check_evaluation((4,), trainer, kept=None) == {"eval_batch_size": 4, "metrics_failed": None}
    assert trainer.model.calls == 2


class Loop:
    """A Trainer on a device that holds so many predictions, which moving them to the host makes room for."""

    def __init__(self, room, device="cuda", own=None):
        self.args = SimpleNamespace(device=SimpleNamespace(type=device), eval_accumulation_steps=own)
        self.room, self.compute_metrics, self.tried = room, lambda predicted: {}, []

    def prediction_step(self):
        """Never called."""

    evaluation_loop = prediction_step

    def evaluate(self):
        args, samples = self.args, self.eval_dataset
        self.tried.append((args.per_device_eval_batch_size, args.eval_accumulation_steps, len(samples)))
        kept = args.per_device_eval_batch_size * (args.eval_accumulation_steps or len(samples))
        if self.compute_metrics is not None and kept > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_predictions_that_do_not_fit_the_device_are_moved_to_the_host_but_in_a_rehearsal(monkeypatch):
    loop, guard = Loop(room=8), Mock()
    found = check_evaluation((16, 8), loop, guard=guard)
    assert (found["eval_batch_size"], found["eval_accumulation_steps"], found["predicted_samples"]) == (8, 1, 30)
    assert [(size, steps) for size, steps, _ in loop.tried] == [(16, None), (16, 1), (8, None), (8, 1)]
    assert guard.begin_anew.call_count == 3
    monkeypatch.setattr("autotune.execution.checking.is_rehearsal", lambda: True)
    with pytest.raises(CheckError, match="while evaluating with a batch of 16: CUDA out of memory"):
        check_evaluation((16, 8), Loop(room=8))


@pytest.mark.parametrize(("device", "tries"), [("cuda", 2), ("cpu", 1)])
def test_predictions_that_fit_nowhere_are_left_out_and_told(device, tries):
    loop = Loop(room=0, device=device)
    found = check_evaluation((4,), loop)
    assert found == {"eval_batch_size": 4, "metrics_failed": "out of memory: CUDA out of memory"}
    assert [kept for _, _, kept in loop.tried] == [30] * tries + [8]


def test_metrics_that_fail_or_data_that_take_too_long_to_read_refuse_nothing_and_are_told(make, monkeypatch):
    found = check_evaluation((4,), make(metrics=lambda predicted: {}["tokenizer"]))
    assert (found["predicted_samples"], found["metrics_failed"]) == (30, "KeyError: 'tokenizer'")
    monkeypatch.setattr("autotune.execution.checking._LONGEST_S", 0.0)
    told = "TimeoutError: reading all samples takes too long; the predictions of the first 8 fitted"
    assert check_evaluation((4,), make()) == {"eval_batch_size": 4, "metrics_failed": told}
    monkeypatch.setattr("autotune.execution.checking.is_rehearsal", lambda: True)  # which takes the time
    assert check_evaluation((4,), make())["predicted_samples"] == 30


def test_evaluation_that_fails_without_metrics_too_is_a_failed_check(make):
    trainer = make()
    trainer.prediction_step = lambda *args, **kwargs: np.zeros(1)[3]
    with pytest.raises(CheckError, match="while evaluating with a batch of 4: index 3"):
        check_evaluation((4,), trainer)


class Wide(Net):
    """Its logits take 4 MiB a sample."""

    def forward(self, features, labels=None):
        found = super().forward(features, labels)
        return {**found, "logits": found["logits"].repeat(1, 1 << 19)}


@pytest.mark.cuda
def test_an_allocator_too_small_for_all_predictions_has_room_for_those_of_a_batch(tmp_path):
    args = TrainingArguments(str(tmp_path), report_to="none", disable_tqdm=True)
    args._n_gpu = min(args.n_gpu, 1)  # a trial sees one device
    trainer = Trainer(Wide(), args, eval_dataset=ROWS, compute_metrics=lambda predicted: {"rows": len(predicted[0])})
    torch.cuda.set_per_process_memory_fraction((96 << 20) / torch.cuda.mem_get_info()[1])
    try:
        found = check_evaluation((4, 2), trainer)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (found["eval_batch_size"], found["eval_accumulation_steps"]) == (4, 1)
    assert found["predictions_bytes"] == 30 * 4 << 20
