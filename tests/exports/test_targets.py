"""Exports to other tools: what each says of an answer, and that it says what it can't."""

import itertools

import pytest
from exporting import EACH_KNOB, SCRIPTS, answer_with, drafted

from autotune.errors import InputError
from autotune.exports import targets
from autotune.values.model import Task


def text(draft):
    return "".join(draft.files.values())


@pytest.mark.parametrize(("target", "knob"), list(itertools.product(SCRIPTS, EACH_KNOB)))
def test_no_knob_is_dropped_in_silence(target, knob):
    plain, changed = drafted(target), drafted(target, **{knob: EACH_KNOB[knob]})
    assert text(changed) != text(plain)


@pytest.mark.parametrize("target", SCRIPTS)
def test_an_argument_of_the_users_own_is_said_or_told(target):
    made = drafted(target, own={"label_smoothing_factor": 0.125})
    assert "label_smoothing_factor" in text(made)
    if target == "accelerate-loop":  # whose arguments are TrainingArguments
        assert made.lost == ("your own argument label_smoothing_factor=0.125",)


@pytest.mark.parametrize("target", SCRIPTS)
def test_a_knob_that_is_one_argument_is_said_or_told(target):
    made = drafted(target, torch_empty_cache_steps=4)
    assert made.lost == (("torch_empty_cache_steps=4",) if target == "accelerate-loop" else ())
    assert "torch_empty_cache_steps" in text(made)


@pytest.mark.parametrize("target", SCRIPTS)
def test_hyperparameters_of_the_users_own_are_carried_over(target):
    made = drafted(target, own={"learning_rate": 1.5e-3, "max_grad_norm": 0.625})
    assert "0.0015" in text(made)
    assert "0.625" in text(made)
    assert not made.lost


@pytest.mark.parametrize(
    ("target", "knobs", "line"),
    [
        ("accelerate-loop", {"optim": "schedule_free_adamw"}, "optimizer schedule_free_adamw"),
    ],
)
def test_what_a_target_can_not_say_stands_in_its_file_and_in_the_answer(target, knobs, line):
    made = drafted(target, **knobs)
    (told,) = [lost for lost in made.lost if lost.startswith(line)]
    unwrapped = " ".join(text(made).replace("\n#", " ").split())
    assert f"not expressed: {told}" in unwrapped


@pytest.mark.parametrize(
    ("target", "answer", "reason"),
    [
        ("trl", {"task": Task.SEQ2SEQ_LM, "kind": "encoder-decoder"}, "SFTTrainer trains causal-lm"),
        ("accelerate-loop", {"parallelism": {"world_size": 2, "sharding": "fsdp_full"}}, "fsdp_full was measured with"),
        ("fsdp", {}, "the configuration doesn't use it"),
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
    assert exported.launch == ("CUDA_VISIBLE_DEVICES=0 python accelerate_loop.py",)
    assert exported.not_expressed == ("torch_empty_cache_steps=4",)
    assert "accelerate-loop: torch_empty_cache_steps=4" in answer.export("all", tmp_path / "new").not_expressed
    assert (tmp_path / "new/launch.txt").read_text() == "python train.py\n"
