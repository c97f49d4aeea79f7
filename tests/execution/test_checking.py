"""Soaks and loss runs: as real trials of a tiny Llama, and what of them needs a hostile disk or another model."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from factories import make_config, make_request, make_workload

from autotune.execution.checking import CheckpointSaver, Reading, around_training, findings
from autotune.execution.evaluating import CheckError, EvaluationData
from autotune.execution.failures import is_out_of_memory
from autotune.execution.gradients import is_random, randomness_off
from autotune.execution.trainer_setup import data_of
from autotune.execution.trial import Trial
from autotune.training.build import build_config
from autotune.training.resolve import resolve
from autotune.training.texts import prepare
from autotune.values.budget import LossTask, SoakTask
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Memory, Purpose, TrialStatus

MIB = 1 << 20
NO_END = {"measure_steps": 10, "relative_interval": 1e-12}


def check(bench, task, **fields):
    purpose = Purpose.SOAK if isinstance(task, SoakTask) else Purpose.LOSS_CHECK
    request = bench.request(**fields).model_copy(update={"purpose": purpose, "task": task})
    return bench.runner.run(request)


def test_a_soak_evaluates_and_saves_weights_and_states_and_leaves_no_file(bench):
    result = check(bench, SoakTask(eval_batch_sizes=(16, 8)), config={"dataloader_num_workers": 1})
    assert result.status is TrialStatus.COMPLETED, result.outcome
    soaked = result.outcome.soaked
    assert (soaked.eval_batch_size, soaked.not_saved) == (16, None)
    states = 3 * 4 * 139_584  # weights and AdamW's two states, fp32
    assert states < soaked.checkpoint_bytes < 1.1 * states
    assert not list(bench.directory(result).rglob("*.safetensors"))
    assert not (bench.directory(result) / "trainer").exists()


@pytest.fixture
def wide(wide_llama):
    """A workload whose logits take 16 MiB a sample."""
    return {"model": resolve(str(wide_llama)), "sequence_length": 128}


def test_an_evaluation_batch_that_does_not_fit_gives_way_to_the_next(bench, wide):
    limits = {"memory_bytes": 600 * MIB}
    result = check(bench, SoakTask(eval_batch_sizes=(64, 4)), workload=wide, limits=limits)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert result.outcome.soaked.eval_batch_size == 4
    assert result.outcome.memory.peak_bytes < 550 * MIB  # of what fitted, not of the attempt that failed


def test_an_evaluation_batch_that_the_limit_had_room_for_gives_way_too(bench, wide):
    """A little more than the budget: the limit alone lets it pass."""
    fields = {"workload": wide, "config": {"per_device_train_batch_size": 1}}
    roomy = check(bench, SoakTask(eval_batch_sizes=(16,)), limits={"memory_bytes": 4000 * MIB}, **fields)
    little_less = roomy.outcome.memory.peak_bytes - 8 * MIB
    result = check(bench, SoakTask(eval_batch_sizes=(16, 2)), limits={"memory_bytes": little_less}, **fields)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert result.outcome.soaked.eval_batch_size == 2
    assert result.outcome.memory.peak_bytes < little_less


class Device:
    """A trainer and its guard: training peaked at 50, evaluating takes four a sample, and there is room for 70."""

    def __init__(self):
        self.args = SimpleNamespace(dataloader_persistent_workers=True, per_device_eval_batch_size=None)
        self._peak, self._known = 50, 0

    def evaluate(self, samples):
        needed = 4 * self.args.per_device_eval_batch_size
        self._peak = max(self._peak, min(needed, 70))
        if needed > 70:
            raise MemoryError

    def pop_callback(self, kind):
        return SimpleNamespace(bytes=1, not_saved=None)

    def peak(self):
        return Memory(device_bytes=max(self._peak, self._known))

    def check(self):
        pass

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
def test_the_peak_of_a_soak_is_that_of_training_or_of_the_evaluation_that_fitted(sizes, fits, peak):
    device = Device()
    found = findings(
        SoakTask(eval_batch_sizes=sizes), device, Reading(EvaluationData(range), lambda steps: None), device
    )
    assert (found["soaked"].eval_batch_size, found["memory"].device_bytes) == (fits, peak)


def test_a_soak_that_runs_out_of_memory_says_where(bench, wide):
    limits = {"memory_bytes": 600 * MIB}
    result = check(bench, SoakTask(eval_batch_sizes=(64,)), workload=wide, limits=limits)
    assert result.status is TrialStatus.OUT_OF_MEMORY
    assert result.outcome.cause.startswith("while evaluating with a batch of 64: ")


def test_a_loss_run_gives_the_loss_of_each_step_whatever_the_split(bench):
    task = LossTask(steps=10, pass_steps=2, seed=1)
    same = {"workload": {"global_batch_size": 4}, "limits": NO_END}
    whole, split = (check(bench, task, config={"per_device_train_batch_size": size}, **same).outcome for size in (4, 1))
    assert split.accumulation_steps == 4
    assert len(whole.curve.losses) == 10
    assert split.curve.losses == pytest.approx(whole.curve.losses, rel=1e-5)
    first, last = whole.curve.losses[:2], whole.curve.losses[-2:]
    assert all(b < a for a, b in zip(first, last, strict=True)), "the same samples come again, and are learnt"
    assert whole.curve.dropout_spread == 0.0


def fake_trainer(tmp_path, states=1000):
    optimizer = SimpleNamespace(state={0: {"exp_avg": torch.zeros(states), "step": 3}})
    args = SimpleNamespace(output_dir=str(tmp_path / "trainer"))
    trainer = SimpleNamespace(model=torch.nn.Linear(10, 10, bias=False), optimizer=optimizer, args=args, callbacks=[])
    trainer.add_callback = trainer.callbacks.append
    return trainer


def control(*, stop):
    return SimpleNamespace(should_training_stop=stop, should_save=False)


def test_a_checkpoint_is_asked_for_after_the_last_step_alone(tmp_path):
    trainer = fake_trainer(tmp_path)
    saver = CheckpointSaver(trainer)
    for stop in (False, True):
        asked = control(stop=stop)
        saver.on_step_end(trainer.args, None, asked)
        assert asked.should_save is stop


def test_a_disk_without_room_for_the_checkpoint_is_told_and_spared(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=512 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    trainer = fake_trainer(tmp_path, states=256 * 1024)
    saver, asked = CheckpointSaver(trainer), control(stop=True)
    saver.on_step_end(trainer.args, None, asked)
    assert not asked.should_save
    assert saver.not_saved == "no checkpoint was saved: it takes 1 MiB, and 512 MiB of disk are free"
    assert saver.bytes is None


def soak_that_raises(trainer, message, *, saving):
    with around_training(SoakTask(eval_batch_sizes=(1,)), trainer):
        if saving:
            trainer.callbacks[0].on_step_end(trainer.args, None, control(stop=True))
        raise RuntimeError(message)


def test_an_error_while_saving_says_so_and_is_still_one_of_memory(tmp_path):
    with pytest.raises(CheckError, match="while saving a checkpoint: ") as raised:
        soak_that_raises(fake_trainer(tmp_path), "DefaultCPUAllocator: can't allocate memory", saving=True)
    assert is_out_of_memory(raised.value)


def test_an_error_before_saving_is_left_as_it_is(tmp_path):
    with pytest.raises(RuntimeError, match=r"^in the first step$"):
        soak_that_raises(fake_trainer(tmp_path), "in the first step", saving=False)


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
    with randomness_off(model):
        assert not is_random(model)
        assert not varies()
    assert is_random(model)
    assert varies()
    assert model.config.to_dict() == before


def test_a_model_without_dropout_is_not_random(tiny_llama):
    from transformers import AutoConfig, AutoModelForCausalLM

    assert not is_random(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_llama)))


@pytest.mark.parametrize("other", [make_config(2, train_sampling_strategy="group_by_length"), make_config(1)])
def test_a_loss_run_reads_the_same_samples_again_and_again_whatever_the_sampler(other, model, tmp_path):
    texts = [json.dumps({"text": "word " * (1 + index % 17)}) for index in range(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))
    dataset = str(tmp_path / "texts.jsonl")
    workload = make_workload(model=model, sequence_length=64, global_batch_size=4, dataset=dataset)
    prepare(workload, tmp_path / "run" / "data")

    def rows(config) -> list[list[int]]:
        task = LossTask(steps=10, pass_steps=2, seed=1)
        request = make_request(config, workload=workload, task=task)
        model_config = build_config(workload.model, workload.task)
        trial = Trial(request, tmp_path / "run" / "trials" / "0000", Stopwatch("data_s"), None, None)
        data, _ = data_of(trial, model_config, 40, longest_first=4)
        return [data[index]["input_ids"].tolist() for index in range(40)]

    usual = rows(make_config(2))
    assert rows(other) == usual
    assert usual == 5 * usual[:8]
