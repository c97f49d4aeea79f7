"""What to try next: one step from the leader, or ever lighter points while nothing fits."""

from factories import CRASHED, OUT_OF_MEMORY, make_config, make_failure, make_measurement, make_result, make_space

from autotune.search.proposals import SAME_FAILURES, proposals
from autotune.space.history import History
from autotune.space.space import SearchSpace
from autotune.values.config import TrainConfig
from autotune.values.knob import Allowance
from autotune.values.trial import Outcome, TrialStatus

PARAMETERS = {
    "precision": ["bf16", "fp32"],
    "per_device_train_batch_size": {"choices": "lattice"},
    "optim": ["adamw_torch_fused", "adafactor"],
    "checkpointing": ["none", "full"],
}
ADAPTERS = {
    "adapter": [None, "lora"],
    "adapter.rank": {"choices": [8, 64], "when": {"adapter": ["lora"]}},
}


def proposed(space: SearchSpace, *trials: tuple[TrainConfig, Outcome | float]) -> list[TrainConfig]:
    history = History()
    for number, (config, outcome) in enumerate(trials):
        history.add(make_result(config, outcome, number=number))
    return [space.config(point) for point in proposals(space, history)]


def test_neighbours_of_the_leader_come_in_the_order_of_the_space():
    assert proposed(make_space(PARAMETERS), (make_config(4), 10.0)) == [
        make_config(4, precision="bf16"),
        make_config(8),
        make_config(2),
        make_config(4, optim="adafactor"),
    ]


def test_the_leader_is_the_fastest_and_not_the_baseline():
    found = proposed(make_space(PARAMETERS), (make_config(4), 10.0), (make_config(8, precision="bf16"), 20.0))
    assert found[0] == make_config(8)
    assert make_config(16, precision="bf16") in found


def test_the_micro_batch_goes_up_one_step_before_it_goes_down_one():
    sizes = [
        c.per_device_train_batch_size
        for c in proposed(make_space({"per_device_train_batch_size": {"choices": "lattice"}}), (make_config(4), 1.0))
    ]
    assert sizes == [8, 2]


def test_checkpointing_is_not_tried_while_memory_is_no_bound():
    space = make_space({"checkpointing": ["none", "full"]})
    assert proposed(space, (make_config(), 10.0)) == []
    bound = (make_config(16), OUT_OF_MEMORY)
    assert proposed(space, (make_config(), 10.0), bound) == [make_config(checkpointing="full")]


def test_checkpointing_of_the_users_own_is_taken_away_whatever_memory_says():
    baseline = make_config(checkpointing="full")
    space = make_space({"checkpointing": ["none", "full"]}, baseline=baseline)
    assert proposed(space, (baseline, 10.0)) == [make_config()]


def test_workers_are_tried_only_where_a_step_waits_for_data():
    space = make_space({"dataloader_num_workers": [0, 2]})
    assert proposed(space, (make_config(), make_measurement(data_wait_share=0.01))) == []
    waiting = proposed(space, (make_config(), make_measurement(data_wait_share=0.3)))
    assert waiting == [make_config(dataloader_num_workers=2)]


def test_a_neighbour_with_an_adapter_has_the_first_choice_of_each_of_its_fields():
    space = make_space(ADAPTERS)
    assert proposed(space, (make_config(), 10.0)) == [make_config(adapter={"rank": 8})]


def test_a_leader_with_an_adapter_has_neighbours_in_its_fields_and_one_without():
    space = make_space(ADAPTERS)
    assert proposed(space, (make_config(adapter={"rank": 8}), 10.0)) == [
        make_config(),
        make_config(adapter={"rank": 64}),
    ]


def test_while_nothing_fits_proposals_get_lighter():
    space = make_space(PARAMETERS)
    assert proposed(space, (make_config(), OUT_OF_MEMORY)) == [
        make_config(8, checkpointing="full"),
        make_config(2, checkpointing="full"),
        make_config(1, checkpointing="full"),
        make_config(1, checkpointing="full", optim="adafactor"),
    ]


def test_the_lightest_of_all_is_an_adapter_on_16_bit_weights():
    space = make_space({**PARAMETERS, **ADAPTERS, "precision": ["fp32", "pure_bf16"]})
    found = proposed(space, (make_config(), OUT_OF_MEMORY))
    assert found[-1] == make_config(1, checkpointing="full", precision="pure_bf16", adapter={"rank": 8})
    assert found[-2] == make_config(1, checkpointing="full", adapter={"rank": 8})


def test_16_bit_weights_are_tried_even_where_no_lighter_optimizer_is():
    space = make_space({"precision": ["pure_bf16"]})
    assert proposed(space, (make_config(), OUT_OF_MEMORY)) == [make_config(precision="pure_bf16")]


def test_an_adapter_space_without_full_training_is_searched_when_full_training_does_not_fit():
    space = make_space({**ADAPTERS, "adapter": ["lora"]})
    assert proposed(space, (make_config(), OUT_OF_MEMORY)) == [make_config(adapter={"rank": 8})]


def test_lighter_points_are_those_that_the_allowance_admits():
    space = make_space({**PARAMETERS, **ADAPTERS, "precision": ["pure_bf16"]}, allowance=Allowance.EXACT)
    for config in proposed(space, (make_config(), OUT_OF_MEMORY)):
        assert space.refusal(config) is None


def test_a_baseline_that_crashes_is_changed_one_knob_at_a_time():
    space = make_space({**PARAMETERS, "attn_implementation": ["sdpa", "eager"]})
    found = proposed(space, (make_config(), CRASHED))
    assert make_config(attn_implementation="eager") in found
    assert make_config(precision="bf16") in found
    assert len(found) == len(space.dimensions)


def test_crashes_beside_lack_of_memory_are_met_with_both():
    space = make_space({**PARAMETERS, "attn_implementation": ["sdpa", "eager"]})
    found = proposed(space, (make_config(), CRASHED), (make_config(precision="bf16"), OUT_OF_MEMORY))
    assert make_config(1, checkpointing="full") in found
    assert make_config(attn_implementation="eager") in found


def test_one_cause_of_many_different_configurations_ends_the_attempts():
    space = make_space(PARAMETERS)
    configs = [make_config(size) for size in (1, 2, 4, 8, 16)][:SAME_FAILURES]
    assert proposed(space, *((c, CRASHED) for c in configs)) == []
    other = make_failure(TrialStatus.INVALID, "something else")
    assert proposed(space, *((c, CRASHED) for c in configs[1:]), (configs[0], other)) != []


def test_every_proposal_is_complete():
    space = make_space({**PARAMETERS, **ADAPTERS})
    for outcome in (10.0, OUT_OF_MEMORY, CRASHED):
        history = History()
        history.add(make_result(make_config(), outcome))
        found = list(proposals(space, history))
        assert found
        assert all(space.complete(point) == point for point in found)


def test_at_the_very_end_are_adapters_on_quantized_weights():
    quantization = {"choices": ["nf4"], "when": {"adapter": ["lora"]}}
    space = make_space({**PARAMETERS, **ADAPTERS, "precision": ["fp32", "pure_bf16"], "quantization": quantization})
    last = proposed(space, (make_config(), OUT_OF_MEMORY))[-1]
    assert (last.adapter.kind, last.quantization, last.precision) == ("lora", "nf4", "pure_bf16")
