"""Configuration, workload and allowance."""

import itertools

import pytest
from factories import make_config, make_workload
from pydantic import ValidationError

from autotune.values.config import Allowance, LengthProfile, Parallelism, TrainConfig
from autotune.values.model import Task


@pytest.mark.parametrize(
    "fields",
    [
        {"micro_batch": 0},
        {"precision": "fp64"},
        {"checkpointing": "some"},
        {"dataloader_num_workers": -1},
        {"adapter": {"kind": "dorra"}},
        {"adapter": {"kind": "lora", "rank": 0}},
        {"adapter": {"kind": "lora", "dropout": 1.0}},
        {"adapter": {"kind": "ia3", "rank": 8}},
        {"quantization": "nf5"},
        {"quantization": "qat"},
    ],
)
def test_what_can_not_be_trained_is_no_configuration(fields):
    with pytest.raises(ValidationError):
        make_config(**fields)


def test_a_misspelt_optimizer_is_refused_with_a_suggestion():
    with pytest.raises(ValidationError, match=r"no optimizer 'adamw_trch'.*'adamw_torch'"):
        make_config(optim="adamw_trch")


def test_a_removed_optimizer_is_refused_with_what_replaced_it():
    with pytest.raises(ValidationError, match="adamw_hf is gone from transformers 5; use adamw_torch"):
        make_config(optim="adamw_hf")


def test_a_misspelt_backend_is_refused_with_a_suggestion():
    with pytest.raises(ValidationError, match=r"'inducter' is no backend of torch.compile.*'inductor'"):
        make_config(torch_compile_backend="inducter")


def test_config_ids_stay_what_they_were_before_later_knobs_came():
    """As they stand in run directories and on record."""
    assert TrainConfig(per_device_train_batch_size=8).config_id == "6de95679e3"
    spread = {"precision": "bf16", "adapter": {"rank": 4}, "parallelism": Parallelism(world_size=2)}
    assert TrainConfig(per_device_train_batch_size=16, **spread).config_id == "74e2fbc6a8"
    assert make_config(torch_empty_cache_steps=1).config_id != make_config().config_id


def test_config_id_tells_configurations_apart():
    ids = {make_config(b, precision=p).config_id for b in (1, 2) for p in ("fp32", "bf16")}
    assert len(ids) == 4


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8, 16])
def test_micro_batch_times_accumulation_is_the_global_batch(micro_batch):
    workload, config = make_workload(global_batch_size=16), make_config(micro_batch)
    assert workload.accumulation_steps(config) * micro_batch == 16
    assert workload.samples_per_step(config) == 16


@pytest.mark.parametrize("micro_batch", [3, 32])
def test_a_micro_batch_that_does_not_divide_the_global_batch_is_an_error(micro_batch):
    with pytest.raises(ValueError, match=f"micro-batch of {micro_batch} does not divide the global batch of 16"):
        make_workload(global_batch_size=16).accumulation_steps(make_config(micro_batch))


def test_a_free_global_batch_is_one_micro_batch():
    workload, config = make_workload(global_batch_size=None), make_config(12)
    assert (workload.accumulation_steps(config), workload.samples_per_step(config)) == (1, 12)


def test_tokens_of_a_synthetic_sample_are_source_and_target():
    assert make_workload(sequence_length=100).tokens_per_sample == 100
    assert make_workload(sequence_length=100, target_length=20, task=Task.SEQ2SEQ_LM).tokens_per_sample == 120


def test_tokens_of_real_samples_are_their_mean():
    lengths = LengthProfile(samples=3, mean=40.5, minimum=1, median=40, p95=90, maximum=99, mean_target=9.5)
    assert make_workload(lengths=lengths).tokens_per_sample == 50


def test_images_have_no_tokens():
    assert make_workload(task=Task.IMAGE_CLASSIFICATION).tokens_per_sample is None


def test_each_allowance_admits_itself_and_what_is_stricter():
    order = [Allowance.EXACT, Allowance.NUMERICS, Allowance.OPTIMIZER, Allowance.METHOD]
    for (i, allowed), (j, asked) in itertools.product(enumerate(order), enumerate(order)):
        assert allowed.admits(asked) == (j <= i)
