"""What each knob brought: what can be taken away, what trials tell of it, and which of them tell most."""

import pytest
from factories import OUT_OF_MEMORY, make_config, make_failure, make_measurement, make_plan, make_result, make_workload

from autotune.planning.plan import SearchState
from autotune.values.config import TrainConfig
from autotune.values.result import Contribution, Explanation, ResultData
from autotune.values.trial import Outcome, Purpose, TrialResult, TrialStatus
from autotune.verification.attribution import explanation_of, removals
from autotune.verification.finals import Finals
from autotune.verification.verdict import assemble

BASE = make_config()
BEST = make_config(16, precision="bf16")
PLAIN, SMALL = make_config(16), make_config(precision="bf16")


class Search:
    """Trials, one after the other, and the answer that they give."""

    def __init__(self, best: TrainConfig = BEST, rate: float = 30.0, baseline: TrainConfig = BASE, **plan) -> None:
        self.plan = make_plan(baseline=baseline, **plan)
        self.trials: list[TrialResult] = []
        self.run(baseline, 10.0, Purpose.BASELINE)
        self.run(best, rate)

    def run(self, config: TrainConfig, outcome: Outcome | float, purpose: Purpose = Purpose.SEARCH, **fields) -> None:
        self.trials.append(make_result(config, outcome, purpose=purpose, number=len(self.trials), **fields))

    def finals(self, *configs: tuple[TrainConfig, float], purpose: Purpose = Purpose.FINAL) -> None:
        for _ in range(2):
            for config, rate in configs:
                self.run(config, rate, purpose)

    def answer(self, refused: dict[TrainConfig, str] | None = None) -> ResultData:
        trials = [t for t in self.trials if t.request.purpose is not Purpose.EXPLAIN]
        state = SearchState(self.plan, trials)
        state.refused |= refused or {}
        return assemble(Finals(state), 100.0)

    def explain(self) -> Explanation:
        return explanation_of(self.plan, self.answer(), self.trials)


def of(found: Explanation, knob: str) -> Contribution:
    return next(c for c in found.contributions if c.changes[0].knob == knob)


@pytest.mark.parametrize(
    ("fields", "knobs"),
    [
        (compiled := {"torch_compile_backend": "inductor", "torch_compile_mode": "max-autotune",
                      "activation_memory_budget": 0.5}, [[*compiled]]),
        (workers := {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4}, [[*workers]]),
        ({"adapter": {"rank": 8}, "quantization": "nf4"}, [["adapter", "quantization"]]),
        ({"precision": "bf16", "optim": "adafactor"}, [["precision"], ["optim"]]),
        ({"parallelism": {"world_size": 2, "sharding": "zero_2"}},
         [["parallelism.world_size", "parallelism.sharding"]]),
    ],
)  # fmt: skip
def test_what_needs_a_knob_goes_with_it(fields, knobs):
    best = make_config(**fields)
    found = removals(Search(best=best).answer())
    assert [[c.knob for c in r.changes] for r in found] == knobs
    if len(knobs) == 1:
        assert found[0].config == BASE


def test_what_is_of_one_kind_of_sharding_goes_with_it():
    several = make_config(1, parallelism={"world_size": 8})
    best = make_config(1, parallelism={"world_size": 8, "sharding": "fsdp_full", "replicas": 2})
    assert removals(Search(best=best, baseline=several).answer())[0].config == several


def test_a_micro_batch_that_does_not_divide_the_global_batch_says_why():
    result = Search(workload=make_workload(global_batch_size=16)).answer()
    odd = result.baseline.model_copy(update={"config": make_config(5)})
    found = removals(result.model_copy(update={"baseline": odd}))[0]
    assert found.config is None
    assert "a micro-batch of 5 does not divide the global batch of 16" in found.cause


def test_finals_beside_the_winner_tell_most_and_trials_of_explain_more():
    search = Search()
    search.run(PLAIN, 5.0)
    told = of(search.explain(), "precision")
    assert (told.basis, told.ratio, told.trials) == ("once", pytest.approx(6.0), ("1", "2"))
    search.finals((BASE, 10.0), (BEST, 30.0), (PLAIN, 20.0))
    told = of(search.explain(), "precision")
    assert (told.basis, told.ratio) == ("in turn", pytest.approx(1.5))
    assert told.interval.low < 1.5 < told.interval.high
    assert told.samples_per_second == pytest.approx(20.0)
    assert told.trials == ("4", "7", "5", "8")
    search.finals((BEST, 40.0), (PLAIN, 20.0), purpose=Purpose.EXPLAIN)
    told = of(search.explain(), "precision")
    assert told.ratio == pytest.approx(2.0)
    assert all(label.startswith("explain ") for label in told.trials)


def test_finals_of_another_series_are_not_compared():
    search = Search()
    search.run(PLAIN, 30.0)
    search.finals((BASE, 10.0), (BEST, 30.0), (PLAIN, 30.0))
    search.run(make_config(2), 1.0)
    search.finals((BASE, 20.0), (BEST, 60.0))  # the machine has become faster
    told = of(search.explain(), "precision")
    assert (told.basis, told.ratio) == ("once", pytest.approx(1.0))


def test_a_removal_that_a_lost_device_ended_is_not_needed():
    search = Search()
    search.run(PLAIN, make_failure(device_failed=True), Purpose.EXPLAIN)
    assert of(search.explain(), "precision").basis == "unknown"


def test_finals_in_turn_tell_by_their_pairs_of_turns():
    search, drift = Search(), (1.0, 1.1, 1.3, 1.2, 1.5, 1.4, 1.0, 1.2)
    for config, rate in ((BASE, 10.0), (BEST, 30.0), (PLAIN, 20.0)):
        times = tuple(step * search.plan.workload.samples_per_step(config) / rate for step in drift)
        search.run(config, make_measurement(step_times_s=times, steps_per_turn=1), Purpose.FINAL)
    told = of(search.explain(), "precision")
    assert (told.basis, told.ratio) == ("in turn", pytest.approx(1.5))
    assert told.interval.high - told.interval.low < 0.1


@pytest.mark.parametrize("status", [TrialStatus.OUT_OF_MEMORY, TrialStatus.CRASHED, TrialStatus.INVALID])
def test_a_knob_without_which_nothing_runs_is_needed(status):
    search = Search()
    search.run(PLAIN, make_failure(status, "it broke"))
    told = of(search.explain(), "precision")
    assert (told.basis, told.ratio, told.is_settled) == ("fails", None, True)
    assert told.cause == f"{status}: it broke (trial 2)"


def test_a_trial_that_the_search_cut_short_tells_nothing_and_what_it_refused_says_why():
    search = Search()
    result = search.answer({PLAIN: "predicted to need more"})
    found = of(explanation_of(search.plan, result, search.trials), "precision")
    assert (found.basis, found.cause) == ("unknown", "the search refused it: predicted to need more")
    search.run(PLAIN, make_failure(TrialStatus.TIMED_OUT))
    assert of(search.explain(), "precision").basis == "unknown"
    search.run(PLAIN, make_failure(TrialStatus.TIMED_OUT), Purpose.EXPLAIN)
    told = of(search.explain(), "precision")
    assert (told.basis, told.is_settled) == ("slow", True)  # a trial to explain has all the time that any may take


def test_what_finals_have_measured_without_each_knob_settles_the_explanation():
    search = Search()
    search.finals((BASE, 10.0), (BEST, 30.0), (PLAIN, 20.0), (SMALL, 15.0))
    found = search.explain()
    assert found.is_settled
    assert found.total == pytest.approx(3.0)


def test_a_single_knob_is_the_whole_a_baseline_that_won_has_none_and_without_a_baseline_there_is_no_total():
    won = Search(best=BASE, rate=11.0)
    assert explanation_of(won.plan, won.answer(), won.trials) is None
    single = Search(best=PLAIN, rate=20.0)
    single.finals((BASE, 10.0), (PLAIN, 20.0))
    found = single.explain()
    assert [c.basis for c in found.contributions] == ["in turn"]  # what is left without it is the baseline
    assert found.contributions[0].ratio == pytest.approx(found.total)
    search = Search()
    search.trials[0] = make_result(BASE, OUT_OF_MEMORY, purpose=Purpose.BASELINE)
    search.finals((BEST, 30.0), (PLAIN, 20.0))
    found = search.explain()
    assert (found.total, found.baseline_samples_per_second) == (None, None)
    assert of(found, "precision").ratio == pytest.approx(1.5)
