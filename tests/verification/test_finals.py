"""The last round: who is measured again, in which order, and what it gives."""

import math
import random

import pytest
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    make_budget,
    make_config,
    make_failure,
    make_hardware,
    make_measurement,
    make_plan,
    make_result,
    make_workload,
)

from autotune.planning.plan import SearchState
from autotune.space.file import load_space
from autotune.units import GIB
from autotune.values.conditions import Conditions
from autotune.values.config import TrainConfig
from autotune.values.problem import Objective
from autotune.values.statistics import DRIFT
from autotune.values.trial import Memory, Outcome, Purpose, TrialStatus
from autotune.verification.finals import Finals
from autotune.verification.verdict import disturbances, verdict_of

BASE, FAST, NEAR, SLOW = make_config(), make_config(16), make_config(4), make_config(2)
SPACE = load_space("cpu")  # read once
SEARCHED = [(BASE, 10.0), (SLOW, 5.0), (NEAR, 19.0), (FAST, 20.0)]


class Search:
    """A finished search whose finals a test runs one by one; by default there is no memory for two at once."""

    def __init__(self, searched: list[tuple[TrainConfig, Outcome | float]], *, free_bytes: int = GIB, **budget) -> None:
        limits = make_budget(**{"finalists": 2, "final_rounds": 2, **budget})
        plan = make_plan(budget=limits, baseline=BASE, hardware=make_hardware(free_bytes=free_bytes), space=SPACE)
        self.searched = dict(searched)
        state = SearchState(plan, (make_result(c, outcome, number=n) for n, (c, outcome) in enumerate(searched)))
        self.results = state.results
        self.finals = Finals(state)

    def measure(self, config: TrainConfig, outcome: Outcome | float = 10.0) -> None:
        number = 100 + len(self.results)
        self.results.append(make_result(config, outcome, purpose=Purpose.FINAL, number=number))

    def run(self) -> list[TrainConfig]:
        """Run the whole schedule, as fast as in the search, and return it."""
        order = []
        while configs := self.finals.next_trials():
            assert len(configs) == 1, "there is no memory for two at once"
            order += configs
            self.measure(configs[0], self.searched[configs[0]])
        return order


def test_contenders_are_the_baseline_and_the_fastest_near_the_leader():
    assert Search(SEARCHED).finals.contenders() == [BASE, FAST, NEAR]
    assert Search(SEARCHED, finalists=1).finals.contenders() == [BASE, FAST]
    assert Search(SEARCHED, finalists=9).finals.contenders() == [BASE, FAST, NEAR]


def test_a_baseline_that_nothing_comes_near_needs_no_round_and_the_only_one_that_fits_does():
    assert Search([(BASE, 10.0), (SLOW, 5.0)]).run() == []
    assert Search([(BASE, OUT_OF_MEMORY), (FAST, 20.0)]).run() == [FAST, FAST]


def test_trials_that_run_alone_go_there_and_back_so_that_a_steady_drift_hits_all_alike():
    order = Search(SEARCHED).run()
    assert set(order[:3]) == {BASE, FAST, NEAR}
    assert order[3:] == order[2::-1]
    drifting = Search([(c, 10.0) for c in (BASE, FAST, NEAR)])
    for place, config in enumerate(order):
        drifting.measure(config, 10.0 * 1.03 ** (place / 5))
    assert drifting.finals.speedup(FAST, BASE).ratio == pytest.approx(1.0, abs=0.001)


@pytest.mark.parametrize("in_turn", [False, True])
def test_who_begins_is_drawn_for_each_search(in_turn):
    """In turn all begin at once, but the first of the processes is there before the others."""
    kind = InTurn if in_turn else Search
    firsts = [kind([(BASE, 10.0 + n), (FAST, 20.0 + n)], finalists=1).finals.next_trials()[0] for n in range(40)]
    assert 10 <= firsts.count(BASE) <= 30


def test_an_interrupted_schedule_goes_on_where_it_was():
    whole = Search(SEARCHED).run()
    for done in (1, 3, 6):
        search = Search(SEARCHED)
        for config in whole[:done]:
            search.measure(config)
        assert len(search.run()) == 6 - done
        assert [len(search.finals.trials(c)) for c in (BASE, FAST, NEAR)] == [2, 2, 2]


def test_for_a_finalist_that_was_slower_than_in_the_search_the_next_comes_as_well():
    search = Search(SEARCHED, finalists=1)
    for config in (BASE, FAST, BASE):
        search.measure(config)
    assert search.finals.contenders() == [BASE, FAST]  # its rounds aren't over
    search.measure(FAST)
    assert search.finals.contenders() == [BASE, FAST, NEAR]
    assert search.run() == [NEAR, NEAR]


def steps(rate, *factors):
    """Return a measurement whose steps take these multiples of what the rate says."""
    return make_measurement(step_times_s=tuple(16 / rate * f for f in factors))


def measured(base, fast, **budget):
    """Return finals of the baseline (10 samples/s) and one finalist (20), each trial slowed by its factor."""
    search = Search([(BASE, 10.0), (FAST, 20.0)], finalists=1, **budget)
    for ours, theirs in zip(base, fast, strict=True):
        search.measure(BASE, steps(10.0, ours * 0.99, ours * 1.01))
        search.measure(FAST, steps(20.0, theirs * 0.99, theirs * 1.01))
    return search


def test_a_lead_within_the_noise_gets_a_round_more_and_another_up_to_twice_the_planned():
    base, fast = (1.0, 1.5, 1.0, 1.5), (1.6, 1.1, 1.1, 1.6)
    firsts = [measured(base[:rounds], fast[:rounds]).finals.further() for rounds in (2, 3, 4)]
    assert sorted(c.config_id for first in firsts for c in first) == sorted((BASE.config_id, FAST.config_id))
    assert firsts[2] == []


def test_a_sure_lead_of_unknown_size_gets_a_round_more():
    search = measured((8.0, 7.0), (1.0, 2.4))
    lead = search.finals.speedup(FAST, BASE)
    assert 1.0 < lead.interval.low < lead.interval.high / 2
    assert search.finals.further() in ([BASE], [FAST])


@pytest.mark.parametrize(("ahead", "is_open"), [(1.05, True), (1.01, False)])
def test_a_finalist_that_seems_faster_than_the_simpler_answer_gets_a_round_more(ahead, is_open):
    changed_more = make_config(16, optim="adafactor")
    search = Search([(BASE, 10.0), (FAST, 20.0), (changed_more, 20.0)])
    for luck in (0.97, 1.03):
        for config, rate, slower in ((BASE, 10.0, 1.0), (FAST, 20.0, 1.0), (changed_more, 20.0 * ahead, luck)):
            search.measure(config, steps(rate, slower * 0.99, slower * 1.01))
    assert verdict_of(search.finals).best == FAST
    assert bool(search.finals.further()) == is_open


def test_a_round_more_is_run_to_its_end_and_none_is_added_once_checks_have_begun():
    search = measured((1.0, 1.5), (1.6, 1.1))
    search.measure(BASE, 40.0)
    assert search.finals.further() == [FAST]
    search.results.append(make_result(FAST, 20.0, purpose=Purpose.SOAK, number=300))
    assert search.finals.further() == []


@pytest.mark.parametrize(("truth", "least", "most"), [(1.2, 0.9, 1.0), (1.0, 0.0, 0.05)])
def test_further_rounds_find_gains_and_seldom_see_one_that_is_none(truth, least, most):
    """Trials spread as much as steps do, by 5 %: finals that always end after two rounds see 62 % of gains of 1.2."""
    noise, cases, holds, gains, longer = random.Random(11), 60, 0, 0, 0
    for _ in range(cases):
        search = Search([(BASE, 10.0), (FAST, 10.0 * truth)], finalists=1)
        while configs := search.finals.next_trials() or search.finals.further():
            luck = math.exp(noise.gauss(0.0, 0.05))
            factors = [luck * math.exp(noise.gauss(0.0, 0.05)) for _ in "12345"]
            search.measure(configs[0], steps(search.searched[configs[0]], *factors))
        interval = search.finals.speedup(FAST, BASE).interval
        holds += interval.low <= truth <= interval.high
        gains += interval.low > 1.0
        longer += len(search.results) > 4 + len(search.searched)
    assert holds >= 0.93 * cases
    assert least * cases <= gains <= most * cases
    assert longer < 0.9 * cases or truth == 1.0


@pytest.mark.parametrize(
    ("in_turn", "order_effect", "finalists", "cases"),
    [
        (False, 0.0, 1, 200),
        (True, 0.01, 1, 200),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in ((False, 0.0, 1, 1000), (False, 0.01, 3, 400), (True, 0.01, 1, 1000), (True, 0.01, 3, 400))
        ),
    ],
)
def test_configurations_alike_are_seldom_called_faster_on_a_gpu(in_turn, order_effect, finalists, cases):
    """Steps vary by 0.1 % there, processes by 0.5 %; who is first, of a round or of those alive, may be slower."""
    noise, called = random.Random(7), 0

    def measured(is_first: bool) -> tuple[float, ...]:
        luck = noise.gauss(0.0, 0.005) + order_effect * is_first
        return tuple(1.6 * math.exp(luck + noise.gauss(0.0, 0.001)) for _ in range(12))

    for _ in range(cases):
        rates = [10.0 * math.exp(noise.gauss(0.0, 0.01)) for _ in range(finalists + 1)]
        alike = zip((BASE, FAST, NEAR, SLOW), rates, strict=False)
        search = (InTurn if in_turn else Search)(list(alike), finalists=finalists)
        while configs := search.finals.next_trials() or search.finals.further():
            if in_turn:
                search.take_turns({c: measured(c == configs[0]) for c in configs})
            else:
                is_first = (len(search.results) - len(search.searched)) % len(rates) == 0
                search.measure(configs[0], make_measurement(step_times_s=measured(is_first)))
        called += verdict_of(search.finals).verdict == "faster"
    assert called <= 0.025 * cases


@pytest.mark.parametrize(("idle", "left"), [(None, 0.7), (0.0, None)], ids=["a CPU", "a GPU that never waited"])
def test_what_others_took_of_the_cores_in_any_round_widens_what_is_told_of_all(idle, left):
    search = Search(SEARCHED)
    for share in (0.3, 0.0):
        conditions = Conditions(others_share=share, idle_share=idle)
        search.measure(FAST, make_measurement(20.0, conditions=conditions))
    measured = search.finals.merged(FAST)
    assert (measured.shown_interval == measured.samples_per_second_interval) == (left is None)
    if left is not None:
        assert measured.shown_interval.low == pytest.approx(left * measured.samples_per_second)


def test_finals_before_a_trial_of_the_search_do_not_count_with_those_after_it():
    """A search that was given more time measures again in turn what it compares."""
    search = Search(SEARCHED, finalists=1)
    search.run()
    search.results.append(make_result(NEAR, 25.0, number=200))
    assert [len(search.finals.trials(c)) for c in (BASE, FAST)] == [2, 2], "they stand until there are others"
    assert search.finals.next_trials() == []
    search.results.append(make_result(NEAR, 25.0, number=201, purpose=Purpose.FINAL))
    assert [len(search.finals.trials(c)) for c in (BASE, FAST, NEAR)] == [0, 0, 1]


RAN_SHORT = make_measurement(20.0, alloc_retries=1)


@pytest.mark.parametrize(
    ("config", "outcome", "is_out"),
    [(FAST, make_failure(TrialStatus.TIMED_OUT), False), (FAST, CRASHED, True), (FAST, RAN_SHORT, True),
     (BASE, RAN_SHORT, False)],
    ids=["cut short", "crashed", "ran short", "a baseline that ran short"],
)  # fmt: skip
def test_who_fails_or_runs_short_in_a_final_is_out_and_the_next_takes_the_place(config, outcome, is_out):
    search = Search(SEARCHED, finalists=1)
    search.measure(config, outcome)
    assert (search.finals.failure(config) is not None) == is_out
    assert search.finals.contenders() == [BASE, NEAR if is_out else FAST]
    assert search.finals.is_measured(config) == (outcome is RAN_SHORT)
    order = search.run()
    assert not is_out or (order.count(FAST), order.count(NEAR)) == (0, 2)


def test_the_finals_of_a_configuration_become_one_measurement():
    search = Search(SEARCHED)
    search.measure(FAST, make_measurement(step_times_s=(1.0, 1.2), memory=Memory(resident_bytes=2 * GIB)))
    search.measure(FAST, make_measurement(step_times_s=(0.8, 1.0), memory=Memory(resident_bytes=GIB)))
    merged = search.finals.merged(FAST)
    assert merged.step_times_s == (1.0, 1.2, 0.8, 1.0)
    assert merged.samples_per_second == pytest.approx(16 / 1.0)
    assert merged.samples_per_second_interval.low < 16 < merged.samples_per_second_interval.high
    assert merged.memory.peak_bytes == 2 * GIB


def test_a_speedup_between_different_global_batches_is_per_sample():
    plan = make_plan(workload=make_workload(global_batch_size=None), baseline=BASE)
    one = make_measurement(step_times_s=(1.0, 1.0))
    results = [make_result(c, one, purpose=Purpose.FINAL, number=n) for n, c in enumerate((BASE, FAST))]
    assert Finals(SearchState(plan, results)).speedup(FAST, BASE).ratio == pytest.approx(2.0)


def test_expected_time_is_that_of_all_rounds_of_all_contenders_or_of_the_baseline_and_a_finalist_to_come():
    finals = Search(SEARCHED).finals
    each = [finals.expected_s([c]) for c in finals.contenders()]
    assert finals.expected_s() == pytest.approx(2 * sum(each))
    alone = Search([(BASE, 10.0)]).finals
    assert alone.expected_s() == pytest.approx(2 * 2 * alone.expected_s([BASE]))
    assert Search([(BASE, OUT_OF_MEMORY)]).finals.expected_s() == 0.0


# Steps: as many as may be measured in the time, or as the budget says.
@pytest.mark.parametrize(("step_s", "steps"), [(2.0, 4), (3.0, 3), (20.0, 1), (0.1, 4 * 6)])
def test_expected_time_covers_a_trial_that_takes_all_its_steps(step_s, steps):
    """Start-up, the first step, what is discarded, and the measured steps."""
    measured = make_measurement(step_times_s=(step_s, step_s), startup_s=5.0, first_step_s=3.0)
    search = Search([(BASE, measured)], discarded_steps=2, discarded_s=0.0, measure_steps=6, measure_time_s=8.0)
    least_s = 5.0 + 3.0 + (2 + steps) * step_s
    assert least_s <= search.finals.expected_s([BASE]) < least_s + 3.0


class InTurn(Search):
    """A finished search on a machine with memory for all finalists at once."""

    def __init__(self, searched, **budget) -> None:
        super().__init__(searched, free_bytes=12 * GIB, **budget)
        self.finals = Finals(self.finals.state, takes_turns=True)

    def take_turns(
        self, times: dict[TrainConfig, tuple[float, ...]], *, steps_per_turn: int | None = 1, others: float = 0.0
    ) -> None:
        first = 100 + len(self.results)
        numbers = tuple(range(first, first + len(times)))
        for number, (config, steps_s) in zip(numbers, times.items(), strict=True):
            conditions = Conditions(others_share=others)
            measured = make_measurement(step_times_s=steps_s, steps_per_turn=steps_per_turn, conditions=conditions)
            result = make_result(config, measured, purpose=Purpose.FINAL, number=number)
            request = result.request.model_copy(update={"in_turn_with": numbers})
            self.results.append(result.model_copy(update={"request": request}))


DRIFTING = tuple(1.6 * slow for slow in (1.0, 1.3, 1.6, 2.0, 1.9, 1.5, 1.2, 1.0))


@pytest.mark.parametrize(
    ("config", "memory", "together"),
    [
        (FAST, Memory(resident_bytes=GIB), 2),
        (FAST, Memory(), 1),
        (make_config(16, dataloader_num_workers=2), Memory(resident_bytes=GIB), 1),
        (make_config(8, parallelism={"world_size": 2}), Memory(resident_bytes=GIB), 1),
    ],
    ids=["room for all", "unknown memory", "workers", "devices"],
)
def test_all_contenders_run_in_turn_if_there_is_memory_and_nothing_computes_meanwhile(config, memory, together):
    search = InTurn([(BASE, 10.0), (config, make_measurement(20.0, memory=memory))])
    assert len(search.finals.next_trials()) == together


@pytest.mark.parametrize(("times", "steps_per_turn"), [(DRIFTING, 1), (DRIFTING * 2, 2)])
def test_a_speedup_in_turn_is_that_of_the_pairs_of_turns_however_the_machine_drifts(times, steps_per_turn):
    search = InTurn(SEARCHED, finalists=1)
    search.take_turns({BASE: times, FAST: tuple(t / 1.25 for t in times)}, steps_per_turn=steps_per_turn)
    lead = search.finals.speedup(FAST, BASE)
    assert lead.ratio == pytest.approx(1.25)
    assert 1.2 < lead.interval.low < lead.interval.high < 1.3


@pytest.mark.parametrize(("once", "told"), [(1.0, False), (9.0, True)], ids=["even", "a turn that others took"])
def test_rates_that_contradict_the_speedup_are_explained(once, told):
    search = InTurn(SEARCHED, finalists=1)
    ours = (once * 1.6 / 1.25, *(1.6 / 1.25,) * 23)
    search.take_turns({BASE: (1.6,) * 24, FAST: ours})
    found = " ".join(disturbances(search.finals, FAST))
    assert ("differ by 0.94x; 1.25x is by turns side by side" in found) == told


def test_the_next_run_of_what_ran_in_turn_deviates_as_the_parts_of_all_contenders_do():
    """Single steps deviate by 3 %, which averages out in each part; the machine drifts by 4 % from part to part.

    At other times it is faster or slower by `DRIFT`.
    """
    search = InTurn(SEARCHED, finalists=1)
    steps = tuple(t * slow for slow in (1.0, 1.04, 1.08, 1.02, 0.98) for t in (0.97, 1.03, 0.98, 1.02))
    search.take_turns({BASE: steps, FAST: tuple(t / 2 for t in steps)})
    measured = search.finals.merged(FAST)
    interval = measured.samples_per_second_interval
    half = math.hypot(2.306 * 0.0374 * math.sqrt(1.2), 1.96 * DRIFT["cpu"])
    assert interval.high / interval.low == pytest.approx(math.exp(2 * half), rel=0.02)
    assert math.sqrt(interval.low * interval.high) == pytest.approx(measured.samples_per_second)


def test_who_comes_late_runs_in_turn_with_the_baseline_unless_the_others_could_not():
    search = InTurn(SEARCHED, finalists=1)
    search.take_turns({BASE: DRIFTING, FAST: DRIFTING})
    assert set(search.finals.next_trials()) == {BASE, NEAR}
    search = InTurn(SEARCHED, finalists=1)
    search.take_turns({BASE: (1.6, 1.6), FAST: (0.8, 0.8)}, steps_per_turn=None)
    assert len(search.finals.next_trials()) == 1


def test_who_came_late_brings_no_further_round_where_nothing_is_open():
    search = InTurn(SEARCHED, finalists=1)
    search.take_turns({BASE: DRIFTING, FAST: tuple(t / 2 for t in DRIFTING)})
    search.take_turns({BASE: DRIFTING, NEAR: tuple(t / 1.9 for t in DRIFTING)})
    assert search.finals.further() == []


def test_finals_in_turn_decide_by_their_intervals_whatever_others_take():
    """Each step takes longer by a share of its own, as beside a process that comes and goes."""
    noise = random.Random(2)
    for truth, verdict in ((1.5, "faster"), (1.0, "no_clear_winner")):
        base = [1.6 * (1 + noise.random()) for _ in range(30)]
        fast = [t / truth * math.exp(noise.gauss(0.0, 0.05)) for t in base]
        search = InTurn(SEARCHED, finalists=1)
        search.take_turns({BASE: tuple(base), FAST: tuple(fast)}, others=0.7)
        assert verdict_of(search.finals).verdict == verdict


def test_who_came_late_on_a_busy_machine_is_compared_with_the_others_by_way_of_the_baseline():
    """The whole machine has become ten times slower, and the late one, 1.3 times the baseline, is no match for FAST."""
    search = InTurn(SEARCHED, finalists=1)
    search.take_turns({BASE: DRIFTING, FAST: tuple(t / 1.8 for t in DRIFTING)})
    slow = tuple(10 * t for t in DRIFTING)
    search.take_turns({BASE: slow, NEAR: tuple(t / 1.3 for t in slow)}, others=0.65)
    lead = search.finals.speedup(FAST, NEAR)
    assert lead.ratio == pytest.approx(1.8 / 1.3)
    assert 1.2 < lead.interval.low < lead.ratio < lead.interval.high < 1.6
    assert verdict_of(search.finals).best == FAST


def test_a_throughput_is_told_by_the_trials_that_others_left_the_machine_to():
    search = InTurn(SEARCHED, finalists=1)
    search.take_turns({BASE: (1.6,) * 8, FAST: (0.8,) * 8}, others=0.05)
    search.take_turns({BASE: (16.0,) * 8, NEAR: (8.0,) * 8}, others=0.65)
    assert search.finals.merged(BASE).samples_per_second == pytest.approx(10.0)
    assert search.finals.merged(NEAR).samples_per_second == pytest.approx(2.0)  # it has no other


@pytest.mark.parametrize(("run_samples", "least_s", "most_s"), [(None, 10.0, 30.0), (1000.0, 60.0, 80.0)])
def test_a_final_of_what_compiles_finds_its_code_in_the_cache_unless_compiling_counts(run_samples, least_s, most_s):
    compiled = make_config(16, torch_compile_backend="inductor")
    slow_to_start = make_measurement(20.0).model_copy(update={"first_step_s": 60.0})
    plan = make_plan(baseline=BASE, space=SPACE, objective=Objective(run_samples=run_samples))
    state = SearchState(plan, [make_result(BASE, 10.0), make_result(compiled, slow_to_start, number=1)])
    assert least_s < Finals(state).setup_s(compiled) < most_s


def test_expected_time_in_turn_is_that_of_all_who_are_alive_at_once():
    finals = InTurn(SEARCHED, measure_time_s=8.0).finals
    setup_s = sum(map(finals.setup_s, (BASE, FAST, NEAR)))
    assert setup_s + 8 * 8.0 <= finals.expected_s() <= setup_s + 8 * 8.0 + 10.0
