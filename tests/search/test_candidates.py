"""The cost model leads a search: it refuses, proposes, learns and knows when to stop; what is proposed without it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    make_config,
    make_limits,
    make_measurement,
    make_plan,
    make_result,
    make_space,
    make_space_file,
)
from predicted_space import GB, PROFILES, SPACE, make_model_of
from profiles import make_model

from autotune.cost.model import CostModel
from autotune.planning.plan import SearchPlan
from autotune.search.candidates import SAME_FAILURES, Candidates, common_cause, proposals
from autotune.space.space import History, SearchSpace
from autotune.values.budget import Budget, Effort
from autotune.values.config import Parallelism, TrainConfig
from autotune.values.problem import Objective
from autotune.values.trial import Memory, Outcome


class Search:
    """A search without a runner: a function says what each trial gives."""

    def __init__(self, model: CostModel | None = None, *, memory_bytes: int = 100 * GB, space=SPACE, **fields) -> None:
        self.plan: SearchPlan = make_plan(space=space, memory_bytes=memory_bytes, **fields)
        self.space = self.plan.search_space
        self.model = model or make_model_of()
        self.candidates = Candidates(self.model, self.plan, self.space)
        self.history = History()

    def is_open(self, config: TrainConfig) -> bool:
        return self.history.known(config) is None and self.space.refusal(config) is None

    def next(self) -> TrainConfig | None:
        return self.candidates.next(self.history, self.is_open)

    def end(self, config: TrainConfig, outcome: Outcome) -> None:
        """Take in a trial."""
        limits = make_limits(memory_bytes=self.plan.memory_bytes)
        result = make_result(config, outcome, limits=limits, number=len(self.history))
        self.history.add(result)
        self.candidates.observe(result)

    def run(self, outcome: Callable[[TrainConfig], Outcome]) -> list[TrainConfig]:
        """Try what comes next until nothing is worth a trial; return what it proposed."""
        proposed = []
        while (config := self.next()) is not None:
            proposed.append(config)
            self.end(config, outcome(config))
        return proposed

    def as_predicted(self, config: TrainConfig, *, slower: float = 1.0) -> Outcome:
        """What the model expected before it learned anything, or slower."""
        estimate = self.model.estimate(config)
        memory = Memory(resident_bytes=estimate.memory.device_peak_bytes)
        return make_measurement(estimate.samples_per_second / slower, memory=memory)


BEST = make_config(16, precision="bf16")


@pytest.mark.parametrize(("run_samples", "first"), [(None, "inductor"), (1e9, "inductor"), (100.0, None)])
def test_what_is_compiled_comes_first_where_the_run_is_long_enough(run_samples, first):
    space = make_space_file({"torch_compile_backend": [None, "inductor"]})
    search = Search(space=space, objective=Objective(run_samples=run_samples))
    assert search.next().torch_compile_backend == first


def test_a_compiled_trial_comes_when_others_give_less_for_their_time_and_only_if_there_is_time_for_it():
    search = Search(space=make_space_file({"torch_compile_backend": [None, "inductor"], "precision": ["fp32", "bf16"]}))
    search.end(search.plan.baseline, search.as_predicted(search.plan.baseline))
    backends = [config.torch_compile_backend for config in search.run(search.as_predicted)]
    assert backends.index("inductor") > 0
    assert set(backends) == {None, "inductor"}
    early = Search(space=make_space_file({"torch_compile_backend": [None, "inductor"]}))
    early.end(early.plan.baseline, early.as_predicted(early.plan.baseline))
    assert early.candidates.next(early.history, early.is_open, left_s=5.0) is None
    assert "as compiling is expected to take" in early.candidates.conclusion(early.history, early.is_open, 5.0)
    assert early.candidates.next(early.history, early.is_open).torch_compile_backend == "inductor"


def test_what_is_not_open_is_passed_over():
    search = Search()
    refused = search.candidates.next(search.history, lambda config: config.precision == "fp32")
    assert refused.precision == "fp32"
    assert search.candidates.next(search.history, lambda config: False) is None


def test_what_is_predicted_not_to_fit_is_never_proposed():
    search = Search(memory_bytes=6 * GB)
    proposed = search.run(search.as_predicted)
    assert proposed
    for config in proposed:
        assert search.model.predict([config]).least_bytes[0] <= 6 * GB
    assert BEST not in proposed


def test_of_two_that_are_as_fast_the_one_that_surely_fits_comes_first():
    """16 samples need some 17.6 GB: as likely as not more than there is."""
    equal = make_model(PROFILES)  # micro-batches are equally fast, but for the Trainer's own milliseconds
    needed = equal.predict([BEST]).needed_bytes[0]
    search = Search(equal, memory_bytes=int(needed))
    assert search.next().per_device_train_batch_size < 16


def test_what_rather_does_not_fit_is_not_tried_once_something_has_completed():
    needed = make_model_of().predict([BEST]).needed_bytes[0]
    search = Search(memory_bytes=int(0.99 * needed))
    assert search.candidates.refusal(BEST) is None
    lighter = make_config(8, precision="bf16")
    search.end(lighter, search.as_predicted(lighter))
    assert BEST not in search.run(search.as_predicted)


def test_it_finds_the_best_of_a_device_that_is_as_predicted_without_trying_all():
    search = Search()
    proposed = search.run(search.as_predicted)
    assert search.history.best().request.config == BEST
    assert len(proposed) <= 3 < len(list(search.space.points()))


def test_it_stops_when_nothing_untried_has_a_fair_chance_of_a_gain():
    search = Search()
    search.end(BEST, search.as_predicted(BEST))
    left = search.run(search.as_predicted)
    assert all(config.precision == "bf16" and config.checkpointing == "none" for config in left)
    assert search.next() is None


@pytest.mark.parametrize("slower", [0.5, 3.0])
def test_a_device_that_is_slower_or_faster_all_over_makes_no_difference(slower):
    search = Search()
    search.run(lambda config: search.as_predicted(config, slower=slower))
    assert search.history.best().request.config == BEST


def test_it_turns_away_from_a_knob_that_proves_slow():
    """16 bits that are emulated: ten times as slow as thought."""
    search = Search()
    baseline = make_config(8)
    search.end(baseline, search.as_predicted(baseline))
    emulated = search.next()
    assert emulated.precision == "bf16"
    search.end(emulated, search.as_predicted(emulated, slower=10))
    assert search.next().precision == "fp32"


def test_a_crash_changes_nothing_but_that_it_is_known():
    search = Search()
    before = search.candidates.prediction(make_config())
    search.end(BEST, CRASHED)
    assert search.candidates.prediction(make_config()) == before
    assert search.next() != BEST


def test_what_is_expected_is_what_the_model_says_now():
    search = Search()
    config = make_config(8)
    estimate = search.model.estimate(config)
    prediction = search.candidates.prediction(config)
    assert prediction.samples_per_second == estimate.samples_per_second
    assert prediction.peak_bytes == estimate.memory.device_peak_bytes
    search.end(config, search.as_predicted(config, slower=2.0))
    assert search.candidates.prediction(config).samples_per_second < 0.6 * estimate.samples_per_second


def test_a_refusal_says_how_much_it_would_take():
    search = Search(memory_bytes=6 * GB)
    assert search.candidates.refusal(make_config(1)) is None
    refusal = search.candidates.refusal(make_config(16))
    assert re.fullmatch(r"predicted to need at least 1\d\.\d+ GiB; the budget is 5\.59 GiB", refusal)


class TestWithoutAPredictionForAll:
    """bf16 couldn't be traced."""

    @pytest.fixture
    def search(self) -> Search:
        return Search(make_model_of([p for p in PROFILES if p.family.autocast is None]))

    def test_only_what_is_predicted_is_proposed(self, search):
        assert search.next() == make_config(16)
        assert all(config.precision == "fp32" for config in search.run(search.as_predicted))

    def test_the_others_are_neither_refused_nor_predicted(self, search):
        assert search.candidates.refusal(BEST) is None
        assert search.candidates.prediction(BEST) is None

    def test_their_trials_teach_nothing_and_are_the_bar_all_the_same(self, search):
        for size in (1, 2):  # a search isn't ended by predictions alone
            search.end(BEST.model_copy(update={"per_device_train_batch_size": size}), make_measurement(1.0))
        search.end(BEST, make_measurement(1e6))
        assert search.next() is None


def test_a_prediction_alone_does_not_end_a_search():
    search = Search()
    search.end(BEST, make_measurement(1e6))
    assert search.next() is not None


def over_two(**fields) -> TrainConfig:
    return make_config(8, parallelism=Parallelism(world_size=2, **fields))


def test_configurations_of_several_devices_are_predicted_and_refused_like_others():
    # DDP clones its outputs.
    several = [p.model_copy(update={"family": p.family.model_copy(update={"clones_outputs": True})}) for p in PROFILES]
    model = make_model_of([*PROFILES, *several])
    search = Search(model)
    sharded, whole = (over_two(sharding=sharding) for sharding in ("zero_3", "none"))
    memory = {c: search.candidates.prediction(c).peak_bytes for c in (sharded, whole)}
    assert memory[sharded] < memory[whole]
    small = Search(model, memory_bytes=memory[sharded] // 10)
    for config in (sharded, whole):
        assert search.candidates.refusal(config) is None
        assert "predicted to need at least" in small.candidates.refusal(config)


def test_offload_is_refused_where_the_host_has_not_the_memory():
    search = Search()
    config = over_two(sharding="zero_2", offload="optimizer")
    assert search.candidates.refusal(config) is None or "host" in search.candidates.refusal(config)
    hardware = search.plan.hardware.model_copy(update={"host_memory_bytes": 1000})
    small = Candidates(search.model, search.plan.model_copy(update={"hardware": hardware}), search.space)
    assert re.match(r"offload is predicted to take .* of the host's memory; it has", small.refusal(config))
    told = small.refusal(over_two(sharding="fsdp_full"))
    assert re.match(r"the whole weights that each rank begins with are predicted to take .* of the host's", told)


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


def test_a_baseline_that_crashes_is_changed_one_knob_at_a_time():
    space = make_space({**PARAMETERS, "attn_implementation": ["sdpa", "eager"]})
    found = proposed(space, (make_config(), CRASHED))
    assert make_config(attn_implementation="eager") in found
    assert make_config(precision="bf16") in found
    assert len(found) == len(space.dimensions)


def test_one_cause_of_many_different_configurations_is_not_theirs_unless_one_completed():
    configs = [make_config(size) for size in (1, 2, 4, 8, 16)][:SAME_FAILURES]
    history = History()
    for config in configs:
        assert common_cause(history) is None
        history.add(make_result(config, CRASHED))
    assert common_cause(history) == CRASHED.cause
    history.add(make_result(make_config(precision="bf16"), 10.0))
    assert common_cause(history) is None


def test_what_shares_a_knob_with_two_that_crashed_alike_comes_after_what_does_not():
    space = make_space_file({"torch_compile_backend": [None, "inductor"], "per_device_train_batch_size": "lattice"})
    search = Search(space=space)
    proposed = []
    while (config := search.next()) is not None and len(proposed) < 4:
        proposed.append(config)
        search.end(config, CRASHED if config.torch_compile_backend else search.as_predicted(config))
    assert [c.torch_compile_backend for c in proposed[:3]] == ["inductor", "inductor", None]


def test_what_is_left_untried_is_counted_with_what_rather_does_not_fit():
    needed = make_model_of().predict([BEST]).needed_bytes[0]
    search = Search(memory_bytes=int(0.99 * needed))
    lighter = make_config(8, precision="bf16", checkpointing="full")
    search.end(lighter, search.as_predicted(lighter))
    search.run(search.as_predicted)
    untried = [c for c in search.candidates.ranked if search.history.known(c) is None]
    may_fit = sum(search.candidates.refusal(config) is None for config in untried)
    said = search.candidates.conclusion(search.history, search.is_open)
    assert sum(map(int, re.findall(r"(\d+) (?:configurations are left|that may be)", said))) == may_fit > 0
    assert "precision bf16" in said.partition("rather don't fit")[2]


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


def test_a_search_goes_on_for_longer_where_more_trials_are_left_to_gain_something_together():
    optimizers = ["adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "rmsprop", "adagrad"]
    space = make_space_file(
        {"optim": optimizers, "precision": ["fp32", "bf16"], "per_device_train_batch_size": "lattice"}
    )

    def tried(most: int) -> int:
        search = Search(make_model(PROFILES), space=space, budget=Budget.of(Effort.THOROUGH).limited(max_trials=most))
        return len(search.run(search.as_predicted))

    assert tried(3) < tried(150)
