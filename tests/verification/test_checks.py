"""What a winner has to pass: which trial is next, what refuses it, and what is said of what was not checked."""

import pytest
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    make_budget,
    make_config,
    make_facts,
    make_failure,
    make_measurement,
    make_plan,
    make_result,
    make_workload,
)

from autotune.planning.plan import SearchState
from autotune.values.budget import LossCurve, LossTask, ProfileTask, Soaked, SoakTask
from autotune.values.config import TrainConfig
from autotune.values.trial import Memory, Outcome, Purpose, TrialStatus
from autotune.values.workload import OwnCode, Recipe
from autotune.verification.checks import LOSS_SHARE, Proof

BASE, FAST = make_config(8), make_config(16)
TIMED_OUT = make_failure(TrialStatus.TIMED_OUT, "cut short")
FITS = make_measurement(soaked=Soaked(eval_batch_size=64, checkpoint_bytes=1000))


def losses(by: float = 0.5) -> Outcome:
    curve = LossCurve(losses=tuple(6.0 - by * step / 19 for step in range(20)), dropout_spread=0.0)
    return make_measurement(curve=curve)


class Search:
    """A search that is over but for its checks, which a test answers one by one."""

    def __init__(self, searched: list[tuple[TrainConfig, Outcome | float]] | None = None, **plan) -> None:
        plan = {"soak": True, "loss_steps": 20, "loss_insisted": True, "baseline": BASE, **plan}
        results = enumerate(searched or [(BASE, 10.0), (FAST, 20.0)])
        state = SearchState(make_plan(**plan), (make_result(c, outcome, number=n) for n, (c, outcome) in results))
        self.results = state.results
        self.proof = Proof(state)

    def answer(self, *outcomes: Outcome | float, winner: TrainConfig = FAST) -> list[tuple[TrainConfig, Purpose]]:
        """Run the checks that come next, one for each outcome; return what they were."""
        asked = []
        for number, outcome in enumerate(outcomes, len(self.results)):
            config, purpose, task, _ = self.proof.next(winner)
            asked.append((config, purpose))
            self.results.append(make_result(config, outcome, purpose=purpose, task=task, number=number))
        return asked


def test_a_check_that_others_crowded_out_refuses_nobody():
    search = Search()
    search.answer(make_failure(TrialStatus.OUT_OF_MEMORY, "others took 30 GiB", crowded_out=True))
    assert search.proof.refusal(FAST) is None
    assert search.proof.next(FAST).purpose is Purpose.LOSS_CHECK
    assert "others took 30 GiB" in search.proof.gaps(FAST)[0]


def test_a_winner_is_soaked_and_then_its_losses_are_compared_with_two_runs_of_the_baseline():
    search = Search()
    soak, *runs = search.answer(FITS, losses(), losses(), losses())
    assert soak == (FAST, Purpose.SOAK)
    assert runs == [(BASE, Purpose.LOSS_CHECK), (BASE, Purpose.LOSS_CHECK), (FAST, Purpose.LOSS_CHECK)]
    assert search.proof.next(FAST) is None
    assert search.proof.soaked(FAST).eval_batch_size == 64
    assert search.proof.verdict(FAST).passed
    assert search.proof.refusal(FAST) is None
    assert search.proof.gaps(FAST) == ()
    one, two, own = (r.request.task for r in search.results if r.request.purpose is Purpose.LOSS_CHECK)
    assert one == own == LossTask(steps=20, pass_steps=4, seed=42)
    assert two == one.model_copy(update={"seed": 43})


def test_winner_and_baseline_are_profiled_once_if_that_takes_a_small_part_of_the_time():
    search = Search(budget=make_budget(max_time_s=1000.0))
    profiles = []
    while check := search.proof.profile(FAST):
        profiles.append((check.config, check.task))
        answered = make_failure() if check.config == BASE else make_measurement(busy_s={"attention": 0.1})
        search.results.append(make_result(check.config, answered, purpose=check.purpose, task=check.task, number=9))
    assert profiles == [(FAST, ProfileTask()), (BASE, ProfileTask())]
    assert search.proof.refusal(FAST) is None
    assert Search(budget=make_budget(max_time_s=300.0)).proof.profile(FAST) is None


def test_the_next_winner_is_held_against_the_same_runs_of_the_baseline():
    other = make_config(4)
    search = Search([(BASE, 10.0), (FAST, 20.0), (other, 15.0)])
    search.answer(FITS, losses(), losses(), losses(0.9))
    assert search.proof.refusal(FAST).startswith("its losses leave the baseline's")
    assert search.answer(FITS, losses(), winner=other) == [(other, Purpose.SOAK), (other, Purpose.LOSS_CHECK)]
    assert search.proof.refusal(other) is None
    assert list(search.proof.refusals()) == [FAST]


def test_the_baseline_as_the_answer_is_soaked_and_compared_with_nothing():
    search = Search()
    assert search.answer(FITS, winner=BASE) == [(BASE, Purpose.SOAK)]
    assert search.proof.next(BASE) is None
    assert search.proof.gaps(BASE) == ()


POWERS = (128, 64, 32, 16, 8, 4, 2, 1)


@pytest.mark.parametrize(
    ("own", "sizes"),
    [(None, POWERS), (64, POWERS[1:]), (48, (48, *POWERS[2:])), (1, (1,)), (500, (500, *POWERS))],
    ids=str,
)
def test_evaluation_is_tried_with_the_largest_batch_first_and_with_none_above_the_users_own(own, sizes):
    fixed = {} if own is None else {"per_device_eval_batch_size": own}
    search = Search(workload=make_workload(fixed_arguments=fixed))
    assert search.proof.next(FAST).task == SoakTask(eval_batch_sizes=sizes)


def test_an_evaluation_that_does_not_fit_as_the_user_does_it_is_told():
    search = Search(workload=make_workload(fixed_arguments={"per_device_eval_batch_size": 128}))
    short = Soaked(eval_batch_size=64, checkpoint_bytes=1000, metrics_failed="out of memory: 2.00 GiB were asked for")
    search.answer(make_measurement(soaked=short))
    assert search.proof.gaps(FAST)[:2] == (
        "evaluating with your batch of 128 does not fit; 64 does",
        "evaluating with your compute_metrics was not checked: out of memory: 2.00 GiB were asked for",
    )


@pytest.mark.parametrize("failure", [OUT_OF_MEMORY, CRASHED])
def test_a_soak_that_fails_is_tried_again_from_the_micro_batch_down_and_then_with_one_sample(failure):
    search = Search(loss_steps=0)
    for sizes in ((16, 8, 4, 2, 1), (1,)):
        search.answer(failure)
        assert search.proof.refusal(FAST) is None
        assert search.proof.next(FAST).task == SoakTask(eval_batch_sizes=sizes)
    search.answer(failure)
    assert search.proof.next(FAST) is None
    assert search.proof.refusal(FAST) == f"soak, trial 4: {failure.status}: {failure.cause}"
    passed = Search(loss_steps=0)
    passed.answer(failure, FITS)
    assert passed.proof.refusal(FAST) is None
    assert passed.proof.soaked(FAST) is not None


ENDED = "too little time was left, or the search was stopped"


@pytest.mark.parametrize(
    ("plan", "answers", "gaps"),
    [
        ({"loss_steps": 0}, [TIMED_OUT], ["not checked on the longest samples: soak, trial 2: timed out: cut short"]),
        ({}, [], [f"not checked on the longest samples: {ENDED}",
                  f"losses were not compared with the baseline's: {ENDED}"]),
        ({"soak": False}, [CRASHED], ["trial 2 of the baseline crashed"]),
    ],
    ids=["cut short", "no time", "the baseline failed"],
)  # fmt: skip
def test_who_could_not_be_checked_is_not_refused_and_it_is_told(plan, answers, gaps):
    search = Search(**plan)
    search.answer(*answers)
    assert (search.proof.next(FAST) is None) == bool(answers)
    assert search.proof.refusals() == {}
    told = search.proof.gaps(FAST)
    assert all(gap in said for gap, said in zip(gaps, told[: len(gaps)], strict=True)), told


def test_a_winner_whose_own_loss_run_fails_is_refused():
    search = Search(soak=False)
    search.answer(losses(), losses(), make_failure(TrialStatus.INVALID, "the loss became nan"))
    assert search.proof.next(FAST) is None
    assert search.proof.refusal(FAST) == "loss check, trial 4: invalid: the loss became nan"


def test_where_the_baseline_does_not_fit_the_largest_default_that_does_is_the_reference():
    smaller, rounded = make_config(4), make_config(8, precision="bf16")
    search = Search([(BASE, OUT_OF_MEMORY), (make_config(2), 8.0), (smaller, 9.0), (rounded, 20.0)], soak=False)
    assert search.proof.reference() == smaller
    assert search.answer(losses(), losses(), losses(), winner=rounded)[0] == (smaller, Purpose.LOSS_CHECK)


GENERATING = Recipe(name="grpo", prompt_length=8, completion_length=8, generations=2)
SAMPLING = OwnCode(kind="script", shown="grpo.py", command=("grpo.py",), directory="/", generates=True)
ROUNDED = make_config(8, precision="bf16")


@pytest.mark.parametrize(
    ("searched", "workload", "why"),
    [
        ([(BASE, OUT_OF_MEMORY), (ROUNDED, 20.0)], make_workload(), "neither the baseline nor"),
        ([(BASE, 10.0), (ROUNDED, 20.0)], make_workload(global_batch_size=None), "with a free global batch, steps"),
        ([(BASE, 10.0), (ROUNDED, 20.0)], make_workload(recipe=GENERATING), "other completions have other losses"),
        ([(BASE, 10.0), (ROUNDED, 20.0)], make_workload(own_code=SAMPLING), "other completions have other losses"),
    ],
    ids=["nothing to compare with", "free batch", "generating", "generating code"],
)
def test_losses_that_can_not_be_compared_are_told(searched, workload, why):
    search = Search(searched, soak=False, workload=workload)
    assert search.proof.next(ROUNDED) is None
    assert search.proof.expected_s() == 0 or not workload.generates
    (gap,) = search.proof.gaps(ROUNDED)
    assert gap.startswith("losses were not compared with the baseline's: ")
    assert why in gap


def test_comparing_that_nobody_asked_for_may_not_take_much_of_the_time():
    short = make_budget(max_time_s=300.0, trial_timeout_s=100.0)
    costly = Search(soak=False, loss_insisted=False, budget=short)
    assert costly.proof.next(FAST) is None
    assert "--check-loss insists" in costly.proof.gaps(FAST)[0]
    assert costly.proof.expected_s() == 0.0
    insisted = Search(soak=False, budget=short)
    assert insisted.proof.next(FAST) is not None
    assert insisted.proof.expected_s() > LOSS_SHARE * 300.0
    task = LossTask(steps=20, pass_steps=4, seed=42)
    costly.results.append(make_result(BASE, losses(), purpose=Purpose.LOSS_CHECK, task=task, number=2))
    assert costly.proof.next(FAST) is not None, "one that has begun goes on"


def test_expected_time_covers_the_soak_and_all_loss_runs():
    """Steps of 1.6 s for the baseline and 0.8 s for the winner, 2 s to start."""
    soak, comparison = Search(loss_steps=0).proof.expected_s(), Search(soak=False).proof.expected_s()
    assert comparison >= 2 * (2 + 20 * 1.6) + 2 + 20 * 0.8
    assert soak >= 2 + 2 * 0.8
    assert Search().proof.expected_s() == pytest.approx(soak + comparison)
    assert Search(soak=False, facts=make_facts(has_dropout=True)).proof.expected_s() > comparison


@pytest.mark.parametrize(("experts", "said"), [(0, 0), (8, 1)])
def test_a_winner_with_experts_that_leaves_no_room_for_uneven_routing_is_told(experts, said):
    full = make_measurement(memory=Memory(resident_bytes=98), soaked=Soaked(eval_batch_size=8, checkpoint_bytes=1))
    plan = {"facts": make_facts(experts=experts), "memory_bytes": 100, "soak": False, "loss_steps": 0}
    gaps = Search([(BASE, full), (FAST, full)], **plan).proof.gaps(FAST)
    assert sum("even routing" in gap for gap in gaps) == said
