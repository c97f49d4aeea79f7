"""The cost model leads a search: it refuses, proposes, learns and knows when to stop; what is proposed without it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    legal_points,
    make_config,
    make_gpu,
    make_limits,
    make_measurement,
    make_plan,
    make_result,
    make_space,
    make_space_file,
)
from predicted_space import GB, PROFILES, SPACE, make_model_of
from profiles import MB, make_family, make_model, make_profile, make_rates, make_work

from autotune.cost.model import CostModel
from autotune.planning.plan import SearchPlan
from autotune.search.candidates import SAME_FAILURES, Candidates, common_cause, failures, proposals
from autotune.space.space import History, SearchSpace
from autotune.storage.writer import TrialConverter
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
        self.candidates = Candidates(self.model, self.plan)
        self.history = History()

    def is_open(self, config: TrainConfig) -> bool:
        return self.history.known(config) is None and self.space.refusal(config) is None

    def next(self) -> TrainConfig | None:
        return self.candidates.next(self.history, self.is_open)

    def end(self, config: TrainConfig, outcome: Outcome) -> None:
        limits = make_limits(memory_bytes=self.plan.memory_bytes)
        result = make_result(config, outcome, limits=limits, number=len(self.history.results))
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
        estimate = self.model.estimate(config)
        memory = Memory(resident_bytes=estimate.memory.device_peak_bytes)
        return make_measurement(estimate.samples_per_second / slower, memory=memory)


BEST = make_config(16, precision="bf16")
COMPILES, COMPILES_OR_ROUNDS, COMPILES_IN_SIZES = (
    make_space_file({"torch_compile_backend": [None, "inductor"], **further})
    for further in ({}, {"precision": ["fp32", "bf16"]}, {"per_device_train_batch_size": [4, 8, 16]})
)


@pytest.mark.parametrize(("run_samples", "first"), [(None, "inductor"), (1e9, "inductor"), (100.0, None)])
def test_what_is_compiled_comes_first_where_the_run_is_long_enough(run_samples, first):
    search = Search(space=COMPILES, objective=Objective(run_samples=run_samples))
    assert search.next().torch_compile_backend == first


@pytest.mark.parametrize(("compiling_s", "then"), [(0.1, "inductor"), (60.0, None)])
def test_over_a_run_the_seconds_count_that_compiling_was_measured_to_take(compiling_s, then):
    search = Search(space=COMPILES_OR_ROUNDS, objective=Objective(run_samples=100.0))
    eager, compiled = search.next(), make_config(torch_compile_backend="inductor")
    assert (eager.precision, eager.torch_compile_backend) == ("bf16", None)
    search.end(eager, search.as_predicted(eager))
    measured = search.as_predicted(compiled)
    first_step_s = max(measured.step_times_s) + compiling_s
    search.end(compiled, measured.model_copy(update={"first_step_s": first_step_s}))
    assert search.next().torch_compile_backend == then


def test_a_compiled_trial_comes_when_others_give_less_for_their_time_and_only_if_there_is_time_for_it():
    search = Search(space=COMPILES_OR_ROUNDS)
    search.end(search.plan.baseline, search.as_predicted(search.plan.baseline))
    backends = [config.torch_compile_backend for config in search.run(search.as_predicted)]
    assert backends.index("inductor") > 0
    assert set(backends) == {None, "inductor"}
    early = Search(space=COMPILES)
    early.end(early.plan.baseline, early.as_predicted(early.plan.baseline))
    assert early.candidates.next(early.history, early.is_open, left_s=5.0) is None
    said = early.candidates.conclusion(early.history, early.is_open, 5.0)
    assert re.fullmatch(r"\d needs? a longer --max-time \(up to [^;]* a trial expected\)", said)
    assert early.candidates.next(early.history, early.is_open).torch_compile_backend == "inductor"


def test_a_trial_that_runs_does_not_make_others_look_quick():
    search = Search(space=COMPILES_OR_ROUNDS)
    search.end(search.plan.baseline, search.as_predicted(search.plan.baseline))
    running, waiting = (make_config(torch_compile_backend="inductor", precision=p) for p in ("fp32", "bf16"))
    assumed = TrialConverter(search.plan).assumed(running, *search.candidates.rates([running]))
    history = search.history.with_results([assumed])
    assert search.candidates.next(history, lambda config: config == waiting, left_s=30.0) is None
    assert search.candidates.next(history, lambda config: config == waiting) == waiting


def test_what_inductor_makes_of_a_family_is_traced_before_the_first_trial_of_it():
    written = make_family(device="cuda")
    plan = make_plan(space=COMPILES_IN_SIZES, hardware=make_gpu(), memory_bytes=GB)
    model = make_model([make_profile(written)], hardware=make_gpu())
    compiled, asked = written.model_copy(update={"compiled": True}), []

    def trace(slower):
        def traced(family):
            asked.append(family)
            return slower and make_profile(compiled, work=(make_work(slower * 10 * MB),))

        candidates, history = Candidates(model, plan, traced), History()
        return candidates.next(history, lambda config: True), candidates.next(history, lambda config: True)

    assert [config.torch_compile_backend for config in trace(2)] == [None, None]  # not faster after all
    assert asked == [compiled]
    assert [config.torch_compile_backend for config in trace(None)] == ["inductor", "inductor"]  # by the rule
    assert asked == [compiled] * 3  # the tracer knows what failed


def test_a_trial_of_long_steps_is_not_begun_where_only_short_ones_have_time_for_theirs():
    slow = make_rates(matmul_flops={"fp32": 3e6, "bf16": 1.2e7}, launch_s=0.6)
    search = Search(make_model(PROFILES, rates=slow))
    search.end(search.plan.baseline, search.as_predicted(search.plan.baseline))
    steps_s = search.model.estimate(BEST).step_time_s
    assert search.candidates.next(search.history, search.is_open, left_s=7 * steps_s) == BEST
    shorter = search.candidates.next(search.history, search.is_open, left_s=2.9 * steps_s)
    assert shorter is not None
    assert shorter.per_device_train_batch_size < 16
    assert search.plan.workload.accumulation_steps(shorter) > 2


def test_what_is_left_where_trials_end_early_is_counted_and_its_most_promising_named():
    search = Search(space=COMPILES)
    baseline, most = search.plan.baseline, len(search.candidates.ranked) - 1
    search.end(baseline, search.as_predicted(baseline))
    said = search.candidates.left_out(search.history, search.is_open)
    assert re.match(rf"with {most} of .* predicted to be 1\.\d\d x as fast as the leader: compile inductor", said)
    compiled = make_config(torch_compile_backend="inductor")
    search.end(compiled, search.as_predicted(compiled))
    assert search.candidates.left_out(search.history, search.is_open).startswith(f"with {most - 1} of ")


def test_nothing_that_fails_alike_or_is_not_open_is_the_most_promising_left_and_a_leader_may_lack_a_prediction():
    search = Search(space=COMPILES_IN_SIZES)
    search.end(search.plan.baseline, search.as_predicted(search.plan.baseline))
    assert "compile inductor" in search.candidates.left_out(search.history, search.is_open)
    assert search.candidates.left_out(search.history, lambda config: False).endswith("untried")
    for size in (4, 8):
        search.end(make_config(size, torch_compile_backend="inductor"), CRASHED)
    assert "inductor" not in search.candidates.left_out(search.history, search.is_open)
    unpredicted = make_config(8, attn_implementation="flex_attention")
    search.end(unpredicted, make_measurement(1e6))
    assert search.candidates.left_out(search.history, search.is_open).endswith("untried")


def test_what_is_not_open_is_passed_over():
    search = Search()
    refused = search.candidates.next(search.history, lambda config: config.precision == "fp32")
    assert refused.precision == "fp32"
    assert search.candidates.next(search.history, lambda config: False) is None


def test_what_is_predicted_not_to_fit_is_never_proposed_and_a_refusal_says_how_much_it_would_take():
    search = Search(memory_bytes=6 * GB)
    assert search.candidates.refusal(make_config(1)) is None
    refusal = search.candidates.refusal(make_config(16))
    assert re.fullmatch(r"predicted to need at least 1\d\.\d+ GiB; the budget is 5\.59 GiB", refusal)
    proposed = search.run(search.as_predicted)
    assert proposed
    for config in proposed:
        assert search.model.predict([config]).least_bytes[0] <= 6 * GB
    assert BEST not in proposed


def test_of_two_that_are_as_fast_the_one_that_surely_fits_comes_first():
    equal = make_model(PROFILES)  # micro-batches are equally fast, but for the Trainer's own milliseconds
    needed = equal.predict([BEST]).needed_bytes[0]  # 16 samples need some 17.6 GB: as likely as not more than there is
    assert Search(equal, memory_bytes=int(needed)).next().per_device_train_batch_size < 16


def test_what_rather_does_not_fit_is_not_tried_once_something_has_completed_and_is_counted_with_what_is_left():
    needed = make_model_of().predict([BEST]).needed_bytes[0]
    search = Search(memory_bytes=int(0.99 * needed))
    assert search.candidates.refusal(BEST) is None
    lighter = make_config(8, precision="bf16", checkpointing="full")
    search.end(lighter, search.as_predicted(lighter))
    assert BEST not in search.run(search.as_predicted)
    untried = [c for c in search.candidates.ranked if search.history.known(c) is None]
    may_fit = sum(search.candidates.refusal(config) is None for config in untried)
    said = search.candidates.conclusion(search.history, search.is_open)
    assert sum(map(int, re.findall(r"(\d+) (?:configurations are left|that may be)", said))) == may_fit > 0
    assert "precision bf16" in said.partition("probably don't fit")[2]


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_it_finds_the_best_without_trying_all_even_where_the_device_is_slower_or_faster_all_over(slower):
    search = Search()
    proposed = search.run(lambda config: search.as_predicted(config, slower=slower))
    assert search.history.best().request.config == BEST
    assert len(proposed) <= (3 if slower == 1.0 else 19) < len(list(legal_points(search.space)))


def test_it_stops_when_nothing_untried_has_a_fair_chance_of_a_gain_but_not_by_a_prediction_alone():
    search = Search()
    search.end(BEST, search.as_predicted(BEST))
    left = search.run(search.as_predicted)
    assert left
    assert all(config.precision == "bf16" and config.checkpointing == "none" for config in left)


def test_it_turns_away_from_a_knob_that_proves_slow():
    search = Search()
    search.end(search.plan.baseline, search.as_predicted(search.plan.baseline))
    emulated = search.next()
    assert emulated.precision == "bf16"
    search.end(emulated, search.as_predicted(emulated, slower=10))
    assert search.next().precision == "fp32"


def test_what_is_expected_is_what_the_model_says_now_to_which_a_crash_makes_no_difference():
    search, config = Search(), make_config(8)
    estimate, prediction = search.model.estimate(config), search.candidates.prediction(config)
    assert prediction.samples_per_second == estimate.samples_per_second
    assert prediction.peak_bytes == estimate.memory.device_peak_bytes
    search.end(BEST, CRASHED)
    assert search.candidates.prediction(config) == prediction
    assert search.next() != BEST
    search.end(config, search.as_predicted(config, slower=2.0))
    assert search.candidates.prediction(config).samples_per_second < 0.6 * estimate.samples_per_second


def test_what_has_no_prediction_is_not_proposed_nor_refused_and_its_trials_are_the_bar_all_the_same():
    without_bf16 = make_model_of([p for p in PROFILES if p.family.autocast is None])
    search = Search(without_bf16)
    assert search.next() == make_config(16)
    assert all(config.precision == "fp32" for config in search.run(search.as_predicted))
    assert search.candidates.refusal(BEST) is None
    assert search.candidates.prediction(BEST) is None
    search = Search(without_bf16)
    for size, rate in ((1, 1.0), (2, 1.0), (16, 1e6)):  # a search isn't ended by predictions alone
        assert search.next() is not None
        search.end(BEST.model_copy(update={"per_device_train_batch_size": size}), make_measurement(rate))
    assert search.next() is None


def over_two(**fields) -> TrainConfig:
    return make_config(8, parallelism=Parallelism(world_size=2, **fields))


def test_configurations_of_several_devices_are_predicted_and_refused_like_others():
    # DDP clones its outputs.
    several = [p.model_copy(update={"family": p.family.model_copy(update={"clones_outputs": True})}) for p in PROFILES]
    model = make_model_of([*PROFILES, *several])
    search = Search(model)
    sharded, whole = (over_two(sharding=sharding) for sharding in ("zero_2", "none"))
    memory = {c: search.candidates.prediction(c).peak_bytes for c in (sharded, whole)}
    assert memory[sharded] < memory[whole]
    small = Search(model, memory_bytes=memory[sharded] // 10)
    for config in (sharded, whole):
        assert search.candidates.refusal(config) is None
        assert "predicted to need at least" in small.candidates.refusal(config)


def test_offload_is_refused_where_the_host_has_not_the_memory():
    search, config = Search(), over_two(sharding="zero_2", offload="optimizer")
    assert search.candidates.refusal(config) is None or "host" in search.candidates.refusal(config)
    hardware = search.plan.hardware.model_copy(update={"host_memory_bytes": 1000})
    small = Candidates(search.model, search.plan.model_copy(update={"hardware": hardware}))
    assert re.match(r"offload is predicted to take .* of the host's memory; it has", small.refusal(config))
    told = small.refusal(over_two(sharding="fsdp_full"))
    assert re.match(r"the whole weights that each rank begins with are predicted to take .* of the host's", told)


PARAMETERS = {
    "precision": ["bf16", "fp32"], "per_device_train_batch_size": {"choices": "lattice"},
    "optim": ["adamw_torch_fused", "adafactor"], "checkpointing": ["none", "full"],
}  # fmt: skip
ADAPTERS = {"adapter": [None, "lora"], "adapter.rank": {"choices": [8, 64], "when": {"adapter": ["lora"]}}}


def proposed(space: SearchSpace, *trials: tuple[TrainConfig, Outcome | float]) -> list[TrainConfig]:
    history = History()
    for number, (config, outcome) in enumerate(trials):
        history.add(make_result(config, outcome, number=number))
    points = list(proposals(space, history))
    assert all(space.complete(point) == point for point in points)
    return [space.config(point) for point in points]


light = functools.partial(make_config, checkpointing="full")
CHECKPOINTING, WORKERS = {"checkpointing": ["none", "full"]}, {"dataloader_num_workers": [0, 2]}
PURE = {**PARAMETERS, **ADAPTERS, "precision": ["fp32", "pure_bf16"]}
QUANTIZED = {**PURE, "quantization": {"choices": ["nf4"], "when": {"adapter": ["lora"]}}}
FULL = (make_config(), OUT_OF_MEMORY)
PROPOSALS = {
    "neighbours of the leader in the order of the space": (
        PARAMETERS, [(make_config(4), 10.0)],
        [make_config(4, precision="bf16"), make_config(8), make_config(2), make_config(4, optim="adafactor")],
    ),
    "no checkpointing while memory is no bound": (CHECKPOINTING, [(make_config(), 10.0)], []),
    "checkpointing where memory is the bound": (
        CHECKPOINTING, [(make_config(), 10.0), (make_config(16), OUT_OF_MEMORY)], [light()]
    ),
    "workers where no step waits for data, which the history refuses": (
        WORKERS, [(make_config(), make_measurement(data_wait_share=0.005))], [make_config(dataloader_num_workers=2)]
    ),
    "workers where a step waits for data": (
        WORKERS, [(make_config(), make_measurement(data_wait_share=0.3))], [make_config(dataloader_num_workers=2)]
    ),
    "neighbours in an adapter's fields, and one without": (
        ADAPTERS, [(make_config(adapter={"rank": 8}), 10.0)], [make_config(), make_config(adapter={"rank": 64})]
    ),
    "ever lighter while nothing fits": (
        PARAMETERS, [FULL], [light(8), light(2), light(1), light(1, optim="adafactor")]
    ),
    "at last an adapter, the lightest on 16-bit weights": (
        PURE, [FULL], [..., light(1, adapter={"rank": 8}), light(1, precision="pure_bf16", adapter={"rank": 8})]
    ),
    "at the very last on quantized weights": (
        QUANTIZED, [FULL], [..., light(1, precision="pure_bf16", adapter={"rank": 8}, quantization="nf4")]
    ),
    "16-bit weights without a lighter optimizer": (
        {"precision": ["pure_bf16"]}, [FULL], [make_config(precision="pure_bf16")]
    ),
    "one knob at a time of a baseline that crashes": (
        {**PARAMETERS, "attn_implementation": ["sdpa", "eager"]}, [(make_config(), CRASHED)],
        [make_config(precision="bf16"), make_config(16), make_config(optim="adafactor"), light(),
         make_config(attn_implementation="eager")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parameters", "trials", "expected"), PROPOSALS.values(), ids=PROPOSALS)
def test_without_predictions_proposals_follow_the_leader_or_why_trials_failed(parameters, trials, expected):
    found = proposed(make_space(parameters), *trials)
    assert (found[1 - len(expected) :] if ... in expected else found) == [c for c in expected if c is not ...]


def test_checkpointing_of_the_users_own_is_taken_away_whatever_memory_says():
    baseline = make_config(checkpointing="full")
    space = make_space({"checkpointing": ["none", "full"]}, baseline=baseline)
    assert proposed(space, (baseline, 10.0)) == [make_config()]


def test_one_cause_of_many_different_configurations_is_not_theirs_unless_one_completed():
    configs = [make_config(size) for size in (1, 2, 4, 8, 16)][:SAME_FAILURES]
    history = History()
    for config in configs:
        assert common_cause(history) is None
        history.add(make_result(config, CRASHED))
    assert common_cause(history) == CRASHED.cause
    history.add(make_result(make_config(precision="bf16"), 10.0))
    assert common_cause(history) is None


def test_failures_of_the_device_count_against_no_configuration_and_end_a_search_on_a_dead_one():
    history, failed = History(), CRASHED.model_copy(update={"device_failed": True})
    for size in (1, 2, 4, 8, 16)[:SAME_FAILURES]:
        history.add(make_result(make_config(size), failed))
    crowded = OUT_OF_MEMORY.model_copy(update={"crowded_out": True})
    history.add(make_result(make_config(32), crowded))
    assert (failures(history), history.shortages) == ({}, [])
    assert common_cause(history) == CRASHED.cause


def test_what_shares_a_knob_with_two_that_crashed_alike_comes_after_what_does_not():
    search = Search(space=COMPILES_IN_SIZES)
    proposed = []
    while (config := search.next()) is not None and len(proposed) < 4:
        proposed.append(config)
        search.end(config, CRASHED if config.torch_compile_backend else search.as_predicted(config))
    assert [c.torch_compile_backend for c in proposed[:3]] == ["inductor", "inductor", None]


def test_a_search_goes_on_for_longer_where_more_trials_are_left_to_gain_something_together():
    optimizers = ["adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "rmsprop", "adagrad"]
    space = make_space_file(
        {"optim": optimizers, "precision": ["fp32", "bf16"], "per_device_train_batch_size": "lattice"}
    )

    def tried(most: int) -> int:
        search = Search(make_model(PROFILES), space=space, budget=Budget.of(Effort.THOROUGH).limited(max_trials=most))
        return len(search.run(search.as_predicted))

    assert tried(3) < tried(150)


def test_what_configurations_gain_that_are_alike_counts_once():
    space = make_space_file({"optim": ["adamw_torch_fused", "adamw_torch", "adafactor", "sgd"], "tf32": [True, False]})
    search = Search(make_model(PROFILES), space=space)
    for config in (search.plan.baseline, search.next()):
        search.end(config, search.as_predicted(config))

    def expected(most: int) -> float:
        plan = search.plan.model_copy(update={"budget": search.plan.budget.limited(max_trials=1 + most)})
        said = Candidates(search.model.observe(*search.history.results), plan).conclusion(
            search.history, search.is_open
        )
        return float(re.search(r"expected to gain ([\d.]+)%", said)[1])

    assert expected(1) < expected(3) < 0.8 * 3 * expected(1)
