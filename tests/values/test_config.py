"""Configurations: what is refused, and their ids."""

import pytest
from factories import make_config
from pydantic import ValidationError

from autotune.values.config import Parallelism, TrainConfig


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
    assert TrainConfig(per_device_train_batch_size=8).config_id == "b5eacc64b4"
    spread = {"precision": "bf16", "adapter": {"rank": 4}, "parallelism": Parallelism(world_size=2)}
    assert TrainConfig(per_device_train_batch_size=16, **spread).config_id == "df9acb880b"
    assert make_config(torch_empty_cache_steps=1).config_id != make_config().config_id


def test_config_id_tells_configurations_apart():
    ids = {make_config(b, precision=p).config_id for b in (1, 2) for p in ("fp32", "bf16")}
    assert len(ids) == 4
