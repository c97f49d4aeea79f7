"""What the trials so far say about a configuration that hasn't run."""

import itertools
import random

import pytest
from factories import CRASHED, OUT_OF_MEMORY, make_config, make_measurement, make_result

from autotune.space.space import History, is_no_harder
from autotune.values.config import TrainConfig
from autotune.values.trial import TrialResult


def history_of(*results: TrialResult) -> History:
    history = History()
    for result in results:
        history.add(result)
    return history


def sample(count: int) -> list[TrainConfig]:
    """Configurations of all kinds, the comparable ones often."""
    draw = random.Random(7)
    return [
        make_config(
            draw.choice([1, 2, 4]),
            checkpointing=draw.choice(["none", "full"]),
            optim=draw.choice(["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "adafactor"]),
            precision=draw.choice(["fp32", "bf16"]),
            dataloader_num_workers=draw.choice([0, 2]),
        )
        for _ in range(count)
    ]


SAMPLE = sample(60)


def test_no_harder_is_reflexive_and_transitive():
    assert all(is_no_harder(config, config) for config in SAMPLE)
    chains = [(a, b, c) for a, b, c in itertools.product(SAMPLE, repeat=3) if is_no_harder(a, b) and is_no_harder(b, c)]
    assert len(chains) > 500
    assert all(is_no_harder(a, c) for a, b, c in chains)


def test_two_that_are_no_harder_than_each_other_differ_in_nothing_that_takes_memory():
    mutual = [(a, b) for a, b in itertools.product(SAMPLE, repeat=2) if is_no_harder(a, b) and is_no_harder(b, a)]
    assert any(a != b for a, b in mutual)
    for a, b in mutual:
        assert a == b.model_copy(update={"dataloader_num_workers": a.dataloader_num_workers})


@pytest.mark.parametrize(
    ("easy", "hard"),
    [
        ({"micro_batch": 4}, {"micro_batch": 8}),
        ({"checkpointing": "full"}, {"checkpointing": "none"}),
        ({"optim": "adamw_bnb_8bit"}, {"optim": "adamw_torch_fused"}),
        ({"optim": "adafactor"}, {"optim": "adamw_torch"}),
        ({"micro_batch": 4, "checkpointing": "full", "optim": "adafactor"}, {"micro_batch": 8}),
    ],
)
def test_an_easier_configuration_that_ran_out_of_memory_rules_out_the_harder(easy, hard):
    history = history_of(make_result(make_config(**easy), OUT_OF_MEMORY, number=3))
    assert history.refusal(make_config(**hard)) == "trial 3, no harder on memory, ran out of it"
    assert history_of(make_result(make_config(**hard), OUT_OF_MEMORY)).refusal(make_config(**easy)) is None


@pytest.mark.parametrize(
    "knobs",
    [
        {"precision": "bf16"},
        {"attn_implementation": "eager"},
        {"torch_compile_backend": "inductor"},
        {"adapter": {}},
        {"optim": "lion_32bit"},
    ],
)
def test_what_may_take_more_or_less_is_not_compared(knobs):
    tried, other = make_config(4), make_config(8, **knobs)
    assert history_of(make_result(tried, OUT_OF_MEMORY)).refusal(other) is None
    assert history_of(make_result(other, OUT_OF_MEMORY)).refusal(make_config(16)) is None


def test_neither_a_crash_nor_a_rate_rules_anything_out():
    """The noise of a trial is larger than what these rates differ by: the true ones may be 10 and 11."""
    results = [
        make_result(make_config(1), 10.0),
        make_result(make_config(2), 10.05),
        make_result(make_config(4), CRASHED),
    ]
    history = history_of(*results)
    assert [history.refusal(make_config(size)) for size in (4, 8, 16)] == [None, None, None]


def test_what_has_run_is_known_by_its_latest_trial_and_ranked_by_rate():
    config = make_config(1)
    first, slow, fast = make_result(config, 10.0), make_result(config, 5.0, number=1), make_result(make_config(2), 9.0)
    history = history_of(first, slow, make_result(make_config(4), CRASHED), fast)
    assert history.known(config) == slow
    assert history.known(make_config(16)) is None
    assert (history.ranking(), history.best(), len(history), history.memory_bound) == ([fast, slow], fast, 4, False)
    failed = history_of(make_result(make_config(), OUT_OF_MEMORY))
    assert (failed.best(), failed.memory_bound) == (None, True)


def waiting(share: float, config: TrainConfig | None = None) -> TrialResult:
    return make_result(config or make_config(), make_measurement(data_wait_share=share))


def test_workers_are_tried_with_the_leader_where_its_steps_wait_for_data():
    few, many = make_config(dataloader_num_workers=2), make_config(4, dataloader_num_workers=2)
    hardly = history_of(waiting(0.004))
    said = "a step of the leader waits for data 0.4% of its time: loading them otherwise can't pay"
    assert (hardly.refusal(few), hardly.refusal(make_config(16))) == (said, None)
    history = history_of(waiting(0.2))
    assert history.refusal(few) is None
    assert "with the leader alone" in history.refusal(many)
    history.add(make_result(few, 1e6))  # a leader with workers is varied with and without them
    assert (history.refusal(many), history.refusal(make_config(4))) == (None, None)
    assert "0.0%" in history.refusal(make_config(4, dataloader_num_workers=4))
    assert "nothing measured" in history_of(make_result(make_config(), OUT_OF_MEMORY)).refusal(many)
    assert History().refusal(few) is None


@pytest.mark.parametrize(
    ("light", "heavy"), list(itertools.pairwise(("offload", "full", "every-2nd", "every-4th", "none")))
)
def test_the_more_layers_are_checkpointed_the_easier_on_memory(light, heavy):
    easy, hard = (make_config(checkpointing=kind) for kind in (light, heavy))
    assert is_no_harder(easy, hard)
    assert not is_no_harder(hard, easy)


def test_balanced_micro_batches_are_compared_among_themselves():
    random, grouped, balanced = (
        make_config(4, train_sampling_strategy=name) for name in ("random", "group_by_length", "batch_rebalance")
    )
    assert is_no_harder(random, grouped)
    assert is_no_harder(balanced, balanced.model_copy(update={"per_device_train_batch_size": 8}))
    assert not is_no_harder(random, balanced)
    assert not is_no_harder(balanced, random)
