"""Exports to other tools: what each says of an answer, and that it says what it can't."""

import pytest
from exporting import CPU, EACH_KNOB, SCRIPTS, answer_with, drafted
from transformers import Trainer, TrainingArguments

from autotune.errors import InputError
from autotune.exports import targets
from autotune.values.model import Task
from autotune.values.techniques import OPTIMIZERS


@pytest.mark.parametrize("knob", EACH_KNOB)
@pytest.mark.parametrize("target", SCRIPTS)
def test_no_knob_is_dropped_in_silence(target, knob):
    assert drafted(target, **{knob: EACH_KNOB[knob]}).text != drafted(target).text


@pytest.mark.parametrize("target", SCRIPTS)
def test_a_knob_without_a_way_of_its_own_is_said_or_told(target):
    made = drafted(target, torch_empty_cache_steps=4)
    is_lost = target == "accelerate-loop"  # whose arguments are no TrainingArguments
    assert made.lost == ("torch_empty_cache_steps=4",) * is_lost
    assert "torch_empty_cache_steps" in made.text


def test_what_a_target_can_not_say_stands_in_its_file_and_in_the_answer():
    made = drafted("accelerate-loop", optim="schedule_free_adamw")
    (told,) = [lost for lost in made.lost if lost.startswith("optimizer schedule_free_adamw")]
    assert f"not expressed: {told}" in " ".join(made.text.split())


FSDP_FULL = {"parallelism": {"world_size": 2, "sharding": "fsdp_full"}}


@pytest.mark.parametrize(
    ("target", "answer", "reason"),
    [
        ("trl", {"task": Task.SEQ2SEQ_LM, "kind": "encoder-decoder"}, "SFTTrainer trains causal-lm"),
        ("accelerate-loop", FSDP_FULL, "fsdp_full was measured with"),
        ("fsdp", {}, "fsdp: the configuration doesn't use it$"),
        ("deepspeed", FSDP_FULL, r"deepspeed: the configuration doesn't use it \(fsdp_full\)"),
        ("accelerate", {"hardware": CPU, "parallelism": {"world_size": 2}}, "torchrun starts them all"),
        ("acelerate", {}, "did you mean 'accelerate'"),
    ],
)
def test_what_can_not_be_trained_there_is_refused(target, answer, reason):
    with pytest.raises(InputError, match=reason):
        drafted(target, **answer)


def test_all_writes_what_can_train_the_answer_and_says_why_others_can_not(tmp_path):
    found, left_out = targets.drafts(answer_with(task=Task.SEQ2SEQ_LM, kind="encoder-decoder"))
    assert set(found) == {"training-args", "python", "accelerate", "accelerate-loop"}
    assert set(found) | set(left_out) == set(targets.TARGETS)


def test_from_python_it_is_the_same(tmp_path):
    answer = answer_with(torch_empty_cache_steps=4)
    exported = answer.export("accelerate-loop", tmp_path / "new")
    assert [path.name for path in exported.paths] == ["accelerate_loop.py"]
    assert exported.launch == ("CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} python accelerate_loop.py",)
    assert exported.not_expressed == ("torch_empty_cache_steps=4",)
    assert "accelerate-loop: torch_empty_cache_steps=4" in answer.export("all", tmp_path / "new").not_expressed
    _, line = (tmp_path / "new/launch.txt").read_text().splitlines()
    assert line == exported.launch[0].replace("accelerate_loop", "train")


@pytest.mark.parametrize("name", targets.NAMES)
def test_a_loop_makes_the_optimizer_that_the_trainer_makes(name, tmp_path):
    package = OPTIMIZERS[name].package
    if package is not None:
        pytest.importorskip(package)
    own = {"learning_rate": 1e-3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-7}
    arguments = TrainingArguments(str(tmp_path), optim=name, use_cpu=True, **own)
    kind, told = Trainer.get_optimizer_cls_and_kwargs(arguments)
    made = targets.loop_optimizer(name, lambda hyperparameter: getattr(arguments, hyperparameter))
    assert made.name == kind.__name__
    assert made.arguments == told
