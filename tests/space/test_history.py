"""What the trials so far say about a configuration that hasn't run."""

import itertools
import random

import pytest
from factories import CRASHED, OUT_OF_MEMORY, make_config, make_measurement, make_result

from autotune.space.history import History, is_no_harder
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


def test_a_configuration_is_no_harder_than_itself():
    assert all(is_no_harder(config, config) for config in SAMPLE)


def test_no_harder_than_is_transitive():
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


def test_a_crash_rules_nothing_out():
    assert history_of(make_result(make_config(4), CRASHED)).refusal(make_config(8)) is None


def test_larger_micro_batches_are_tried_after_two_that_were_as_fast():
    """The noise of a trial is larger than what they differ by: the true rates may be 10 and 11."""
    history = history_of(make_result(make_config(1), 10.0), make_result(make_config(2), 10.05))
    assert [history.refusal(make_config(size)) for size in (4, 8, 16)] == [None, None, None]


def test_what_has_run_is_known_by_its_latest_trial():
    config = make_config()
    history = history_of(make_result(config, 10.0), make_result(config, 12.0, number=1))
    assert history.known(config).request.number == 1
    assert history.known(make_config(4)) is None
    assert len(history) == 2


def test_the_ranking_is_of_what_completed_the_fastest_first():
    slow, fast = make_result(make_config(1), 5.0), make_result(make_config(2), 9.0)
    history = history_of(slow, make_result(make_config(4), CRASHED), fast)
    assert history.ranking() == [fast, slow]
    assert history.best() == fast


def test_nothing_completed_has_no_best():
    history = history_of(make_result(make_config(), OUT_OF_MEMORY))
    assert history.best() is None
    assert history.memory_bound
    assert not history_of(make_result(make_config(), CRASHED)).memory_bound


def waiting(share: float, config: TrainConfig | None = None) -> TrialResult:
    return make_result(config or make_config(), make_measurement(data_wait_share=share))


def test_workers_are_not_tried_where_steps_hardly_wait_for_data():
    history = history_of(waiting(0.004))
    refusal = history.refusal(make_config(dataloader_num_workers=2))
    assert refusal == "a step of the leader waits for data 0.4% of its time: loading them otherwise can't pay"
    assert history.refusal(make_config(16)) is None


def test_workers_are_tried_with_the_leader_where_its_steps_wait():
    history = history_of(waiting(0.2))
    assert history.refusal(make_config(dataloader_num_workers=2)) is None
    assert "with the leader alone" in history.refusal(make_config(4, dataloader_num_workers=2))


def test_a_leader_with_workers_is_varied_with_and_without_them():
    history = history_of(waiting(0.2), make_result(make_config(dataloader_num_workers=2), 1e6))
    assert history.refusal(make_config(4, dataloader_num_workers=2)) is None
    assert history.refusal(make_config(4)) is None
    assert "0.0%" in history.refusal(make_config(4, dataloader_num_workers=4))


def test_without_a_measurement_the_loading_of_data_stays_as_it_is():
    history = history_of(make_result(make_config(), OUT_OF_MEMORY))
    assert "nothing measured" in history.refusal(make_config(4, dataloader_num_workers=2))
    assert History().refusal(make_config(dataloader_num_workers=2)) is None


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
