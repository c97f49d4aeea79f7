"""Points are plain values: what an adapter's kind hasn't is left out of a search's points and refused elsewhere."""

import pytest
from factories import make_config
from pydantic import ValidationError

from autotune.space.knobs import PARAMETERS, differing, fitting, has_field, make_point, problem
from autotune.space.knobs import make_config as config_at
from autotune.values.adapters import ADAPTERS


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_of_adapter_survives_the_way_to_a_point_and_back(kind):
    config = make_config(adapter={"kind": kind}, quantization="nf4")
    assert config_at(make_point(config)) == config


def test_the_fields_of_every_kind_are_parameters_where_the_kind_has_them():
    assert {"adapter.rank", "adapter.virtual_tokens", "adapter.encoder_hidden_size", "quantization"} <= PARAMETERS
    assert "adapter.kind" not in PARAMETERS
    found = [
        ("prefix", "adapter.virtual_tokens"),
        ("prefix", "adapter.rank"),
        (None, "adapter.rank"),
        (None, "precision"),
    ]
    assert [has_field(*each) for each in found] == [True, False, False, True]
    with pytest.raises(ValidationError, match="rank"):
        config_at({"per_device_train_batch_size": 1, "adapter": "ia3", "adapter.rank": 8})


def test_a_search_that_changes_the_kind_leaves_out_what_the_new_one_has_not():
    origin = make_point(make_config())
    leader = {"adapter": "ia3", "adapter.rank": 8, "adapter.target_modules": "attention"}
    assert config_at(fitting(leader, origin)).adapter == ADAPTERS["ia3"]()


def test_another_kind_starts_from_its_own_defaults():
    origin = make_point(make_config(adapter={"kind": "lora", "rank": 4}))
    assert config_at(fitting({"adapter": "vera"}, origin)).adapter.rank == ADAPTERS["vera"]().rank
    assert config_at(fitting({}, origin)).adapter.rank == 4
    assert config_at(fitting({"adapter": None}, origin)).adapter is None


def test_what_differs_from_the_baseline_makes_the_configuration_again():
    baseline = make_config(8)
    for config in (baseline, make_config(1, optim="adafactor"), make_config(8, adapter={"kind": "lora", "rank": 4})):
        assert config_at(fitting(differing(config, baseline), make_point(baseline))) == config
    lora = make_config(4, adapter={"kind": "lora"}, parallelism={"world_size": 2})
    assert differing(lora, baseline) == {"per_device_train_batch_size": 4, "adapter": "lora"}


@pytest.mark.parametrize(
    ("parameter", "value", "said"),
    [
        ("adapter.virtual_tokens", 20, None),
        ("adapter.virtual_tokens", 0, "0 is no value for it (expected a number above 0)"),
        ("adapter", "lorra", "'lorra' is unknown (did you mean 'lora'"),
        ("quantization", "nf5", "'nf5' is no value for it"),
        ("adapter.target_modules", "all-linear+experts", None),
    ],
)
def test_a_value_is_one_that_some_kind_takes(parameter, value, said):
    found = problem(parameter, value)
    assert found is None if said is None else said in found
