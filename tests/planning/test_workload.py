"""What is trained, from the user's words: task, lengths, global batch, and the length of a run."""

import pytest
from factories import make_facts
from plans import outlined, planned
from tiny_models import write_model
from vision_language import vision_language

from autotune.errors import InputError
from autotune.planning.planner import complete
from autotune.planning.workload import check_global_batch, default_global_batch
from autotune.values.model import Task

HUGE = 9999999999999999999999999


def test_a_free_global_batch_is_said_to_compare_what_learns_differently():
    found = outlined(global_batch="any")
    assert found.workload.global_batch_size is None
    assert any("the global batch is free" in note for note in found.notes)


def test_the_global_batch_of_given_arguments_is_theirs(arguments):
    plan = planned(baseline=arguments(per_device_train_batch_size=4, gradient_accumulation_steps=6))
    assert plan.workload.global_batch_size == 24
    assert plan.baseline.per_device_train_batch_size == 4


def test_a_global_batch_beside_other_arguments_must_agree_with_them(arguments):
    path = arguments(per_device_train_batch_size=4)
    assert outlined(baseline=path, global_batch=4).workload.global_batch_size == 4
    with pytest.raises(InputError, match="--global-batch 64: the baseline's is 4"):
        outlined(baseline=path, global_batch=64)


def test_fixed_arguments_of_the_user_are_part_of_the_workload(arguments):
    found = outlined(baseline=arguments(learning_rate=1e-3, bf16=True))
    assert found.workload.fixed_arguments == {"learning_rate": 1e-3}


def test_the_target_is_as_long_as_the_source_by_default():
    assert outlined(model="t5-small", seq_len=40).workload.target_length == 40
    assert outlined(model="gpt2", seq_len=40).workload.target_length is None


def test_the_task_is_the_usual_one_of_the_model_unless_another_is_asked_for():
    assert outlined(model="t5-small").workload.task is Task.SEQ2SEQ_LM
    task = Task.SEQUENCE_CLASSIFICATION
    assert outlined(model="gpt2", task=task.value).workload.task is task


def test_samples_of_speech_are_counted_in_frames():
    found = outlined(model="wav2vec2-base")
    assert (found.workload.task, found.workload.sequence_length) == (Task.SPEECH_CTC, 64)
    assert "samples of 64 frames of sound (--seq-len)" in found.notes
    assert found.workload.tokens_per_sample is None


def test_whisper_takes_half_a_minute_and_transcripts_of_its_own_length():
    workload = outlined(model="whisper-tiny").workload
    assert (workload.sequence_length, workload.target_length) == (1500, 128)
    assert outlined(model="whisper-tiny", target_len=60).workload.target_length == 60
    with pytest.raises(InputError, match="--seq-len 128: openai/whisper-tiny takes 1500 frames of sound and no other"):
        outlined(model="whisper-tiny", seq_len=128)


def test_a_recording_too_short_to_be_trained_on_is_refused():
    with pytest.raises(InputError, match="--seq-len 5: facebook/wav2vec2-base hides spans of 10 frames"):
        outlined(model="wav2vec2-base", seq_len=5)


def test_the_length_of_a_run_is_one_of_samples_whatever_it_was_given_in():
    assert planned().objective.run_samples is None
    assert planned(train_steps=100, global_batch=16).objective.run_samples == 1600
    assert planned(train_tokens=1e6, seq_len=100).objective.run_samples == 10_000


def test_images_have_no_tokens_to_say_the_length_of_a_run_in():
    with pytest.raises(InputError, match="--train-tokens: image-classification has no tokens; use --train-steps"):
        planned(model="vit-base", train_tokens=1e6)


def test_a_global_batch_that_the_devices_cannot_share_is_refused_with_the_nearest(eight_cores):
    with pytest.raises(InputError, match="--global-batch 10: 4 devices can't share it evenly; 8 and 12 do"):
        outlined(devices=4, global_batch=10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"global_batch": HUGE}, r"--global-batch 9{25}: use at most 1048576 samples a step"),
        ({"global_batch": 1048577}, "--global-batch 1048577: use at most 1048576"),
        ({"seq_len": HUGE}, r"--seq-len 9{25}: use at most 10000000"),
        ({"model": "t5-small", "target_len": HUGE}, r"--target-len 9{25}: use at most 10000000"),
    ],
)
def test_what_nobody_trains_with_is_refused_in_a_moment(options, said):
    with pytest.raises(InputError, match=said):
        outlined(**options)


@pytest.mark.parametrize(
    "document",
    [
        {"per_device_train_batch_size": HUGE},
        {"gradient_accumulation_steps": HUGE},
        {"per_device_train_batch_size": 2048, "gradient_accumulation_steps": 2048},
    ],
)
def test_a_baseline_that_nobody_trains_with_is_refused_in_a_moment(arguments, document):
    with pytest.raises(InputError, match=r"args\.json: the global batch \d+: use at most 1048576"):
        outlined(baseline=arguments(**document))


def test_a_baseline_is_refused_beside_a_free_global_batch_as_well(arguments):
    found = outlined(baseline=arguments(per_device_train_batch_size=HUGE), global_batch="any")
    with pytest.raises(InputError, match=r"args\.json: per_device_train_batch_size: expected 1048576 or less"):
        complete(found, make_facts())


def test_the_largest_global_batch_is_planned():
    assert planned(global_batch=1048576).workload.global_batch_size == 1048576


def test_a_transcript_longer_than_the_decoder_is_refused():
    facts = make_facts(task=Task.SPEECH_SEQ2SEQ, max_target_length=448)
    with pytest.raises(InputError, match="--target-len 500: openai/whisper-tiny has 448 positions"):
        planned(facts, model="whisper-tiny", target_len=500)


def test_a_sample_is_as_long_as_its_images_and_a_text_of_the_usual_length():
    found = outlined(model="llava-1.5-7b", images=2)
    assert found.workload.sequence_length == 2 * 577 + 1 + 64
    assert (found.workload.images, found.workload.image_size) == (2, 336)
    assert any(note.startswith("2 images of 336 pixels as 576 tokens in each sample") for note in found.notes)


def test_a_sample_of_the_usual_length_is_no_longer_than_the_positions_of_the_text(tmp_path):
    config = vision_language()["llava"]
    config["text_config"]["max_position_embeddings"] = 70  # 18 tokens are of an image, and 64 of a text
    found = outlined(model=str(write_model(tmp_path, config)))
    assert found.workload.sequence_length == 70


def test_a_sample_that_is_too_short_for_its_images_is_refused():
    with pytest.raises(InputError, match="--seq-len 512: a sample's images take 578 tokens; use at least 580"):
        outlined(model="llava-1.5-7b", seq_len=512)


@pytest.mark.parametrize("asked", [{"images": 2}, {"image_size": 448}, {"freeze_vision": True}])
def test_images_of_a_model_of_text_are_refused(asked):
    option = "--" + next(iter(asked)).replace("_", "-")
    with pytest.raises(InputError, match=f"{option}: the task causal-lm has no images beside texts"):
        outlined(model="gpt2", **asked)


@pytest.mark.parametrize(
    ("asked", "ranks", "nearest"), [(16, 3, "15 and 18 do"), (2, 4, "4 does"), (10, 8, "8 and 16 do")]
)
def test_a_global_batch_that_cannot_be_shared_evenly_is_refused_with_the_nearest(asked, ranks, nearest):
    with pytest.raises(InputError, match=f"--global-batch {asked}: {ranks} devices can't share it evenly; {nearest}"):
        check_global_batch(asked, ranks)


def test_a_default_global_batch_can_be_shared_evenly():
    assert [default_global_batch(64, ranks) for ranks in (1, 2, 3, 8)] == [64, 64, 66, 64]
    check_global_batch(default_global_batch(64, 5), 5)
