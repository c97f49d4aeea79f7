"""What earlier searches are worth to the next one: refusals, an old winner to measure first, lessons."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    ScriptedRunner,
    make_budget,
    make_config,
    make_failure,
    make_gpu,
    make_limits,
    make_measurement,
    make_plan,
    make_request,
    make_result,
    make_space_file,
    make_workload,
)
from predicted_space import KINDS, make_model_of, profile_of
from profiles import MB
from recorded_searches import DAY, keep, recorded_search, recorded_trial
from scripted_searches import interrupted
from search_events import Heard

from autotune.search.earlier import EarlierSearches, cut_short, hopeless_after_s
from autotune.search.tuner import SearchInterrupted, Tuner
from autotune.space.space import History
from autotune.storage.record import Record
from autotune.storage.recorded import RecordedSearch, read_recorded
from autotune.storage.run_directory import RunDirectory
from autotune.storage.writer import RecordWriter
from autotune.units import GIB, now
from autotune.values.budget import Budget, Effort
from autotune.values.conditions import Conditions
from autotune.values.config import Allowance, Parallelism, TrainConfig
from autotune.values.problem import Objective
from autotune.values.trial import Memory, Purpose, TrialRequest, TrialStatus

PARAMETERS = {
    "precision": ["fp32", "bf16"],
    "checkpointing": ["none", "full"],
    "optim": ["adamw_torch_fused", "adafactor"],
    "per_device_train_batch_size": "lattice",
}
PLAN = make_plan(space=make_space_file(PARAMETERS))
BASE = PLAN.baseline
FAST = make_config(16, precision="bf16")
SECOND = make_config(8, precision="bf16")
TIMED_OUT = make_failure(TrialStatus.TIMED_OUT, "no result")


def kept(*trials, plan=PLAN, **fields):
    return recorded_search(*trials, plan=plan, **fields)


def history_of(*measured: tuple[TrainConfig, object]) -> History:
    results = (make_result(config, outcome, number=number) for number, (config, outcome) in enumerate(measured))
    return History().with_results(results)


def after(*searches, plan=PLAN, now=()) -> EarlierSearches:
    """What is known of earlier searches after the trials of `now`, taken note of one by one."""
    earlier = EarlierSearches(plan, searches)
    for count in range(len(now) + 1):
        earlier.compare(history_of(*now[:count]))
    return earlier


def refused(config: TrainConfig, *searches, plan=PLAN, now=()) -> str | None:
    return after(*searches, plan=plan, now=now).refusal(config, history_of(*now).best())


TYPICAL = kept(recorded_trial(FAST, 20.0), recorded_trial(SECOND, 15.0))


@pytest.mark.parametrize(("micro", "least_s"), [(1, 40.0), (32, 15.0 + 2.5 * 4 * 64 / 4)])
def test_a_trial_of_longer_steps_has_the_time_of_one_as_fast_as_the_leader(micro, least_s):
    """Two micro-steps of 32 samples at 4 a second take 16 s; two steps are discarded, and two count."""
    plan = make_plan(workload=make_workload(global_batch_size=64), budget=Budget.of(Effort.STANDARD))
    leader = make_result(make_config(1), make_measurement(4.0), duration_s=10.0)
    assert hopeless_after_s(plan, make_config(micro), leader) == pytest.approx(least_s)


def timed_out(number=0, timeout_s=100.0, **fields):
    limits = make_limits(timeout_s=timeout_s)
    return make_result(make_config(2), TIMED_OUT, number=number, limits=limits, **fields)


def test_what_ended_at_a_shorter_limit_is_tried_again_in_a_search_that_has_more_time():
    plan, quick = make_plan(budget=Budget.of(Effort.STANDARD), reopened_at=3), make_result(BASE, 10.0, duration_s=20.0)
    assert cut_short(plan, [timed_out()]) == [timed_out()]
    assert cut_short(plan, [timed_out(timeout_s=300.0), timed_out(7)]) == []  # the usual limit, and within the new ones
    assert cut_short(plan, [quick, timed_out(timeout_s=30.0)]) == [timed_out(timeout_s=30.0)]
    assert cut_short(plan, [quick, timed_out()]) == []  # as it had no hope beside the leader
    assert cut_short(make_plan(), [timed_out()]) == []


def test_where_all_of_an_earlier_search_failed_no_configuration_is_refused_for_it():
    first, crashed = recorded_trial(BASE, CRASHED, purpose=Purpose.BASELINE), recorded_trial(FAST, CRASHED)
    assert refused(FAST, kept(first, crashed), now=[(BASE, 10.0)]) is None
    assert "crashed on" in refused(FAST, kept(first, crashed, recorded_trial(SECOND, 15.0)), now=[(BASE, 10.0)])


def test_what_was_trained_over_other_numbers_of_devices_is_another_search():
    earlier = kept(recorded_trial(BASE, 10.0), recorded_trial(FAST, 20.0))
    two = PLAN.model_copy(update={"baseline": make_config(8, parallelism=Parallelism(world_size=2))})
    assert after(earlier).count == 2
    assert after(earlier, plan=two).count == 0
    both = make_space_file({**PARAMETERS, "parallelism.world_size": [1, 2]})
    assert after(earlier, plan=two.model_copy(update={"space": both})).count == 2


def places(value, path=()):
    """Each place in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("odd", [0, -1, 1e308, float("inf"), float("nan"), "5", None, [], {}, 10**30], ids=repr)
def test_a_record_with_any_odd_value_ends_no_search(odd):
    whole = json.loads(TYPICAL.model_dump_json())
    whole["trials"] = whole["trials"][:2]
    for path in list(places(whole)):
        spoilt = json.loads(json.dumps(whole))
        at = functools.reduce(lambda inner, key: inner[key], path[:-1], spoilt)
        at[path[-1]] = odd
        try:
            search = RecordedSearch.model_validate({**spoilt, "trials": ()})
            trials = tuple(read_recorded(json.dumps(trial)) for trial in spoilt["trials"])
        except (ValueError, TypeError):
            continue  # which a reader of the record passes over
        search = search.model_copy(update={"trials": trials})
        refused(SECOND, search, now=[(BASE, 10.0), (FAST, 20.0)])
        assert search.best_samples_per_second is None or search.best_samples_per_second > 0


class TestMemory:
    @pytest.mark.parametrize(("budget", "is_refused"), [(4, True), (8, True), (9, False)])
    def test_within_a_larger_budget_it_may_fit(self, budget, is_refused):
        plan = PLAN.model_copy(update={"memory_bytes": budget * GIB})
        short = kept(recorded_trial(FAST, OUT_OF_MEMORY, memory_bytes=8 * GIB))
        assert (refused(FAST, short, plan=plan) is not None) == is_refused

    def test_a_configuration_harder_on_memory_than_one_that_ran_out_is_refused_and_an_easier_one_is_not(self):
        short = kept(recorded_trial(make_config(4, precision="bf16"), OUT_OF_MEMORY))
        said = "a configuration no harder on memory ran out of memory within 8.00 GiB"
        assert refused(SECOND, short).startswith(said)
        assert refused(FAST, short) is None, "no gradients stay while others are computed"
        assert refused(make_config(2, precision="bf16"), short) is None
        assert refused(make_config(16), short) is None, "of another kind"

    @pytest.mark.parametrize("excuse", ["crowded_out", "device_failed"])
    @pytest.mark.parametrize("outcome", [OUT_OF_MEMORY, CRASHED], ids=["memory", "crash"])
    def test_what_others_or_the_device_brought_about_is_not_held_against_it(self, outcome, excuse):
        excused = outcome.model_copy(update={excuse: True})
        assert refused(FAST, kept(recorded_trial(FAST, excused)), now=[(BASE, 10.0)]) is None
        assert refused(FAST, kept(recorded_trial(FAST, outcome)), now=[(BASE, 10.0)]) is not None

    def test_what_fitted_later_is_not_refused(self):
        shortage = recorded_trial(FAST, OUT_OF_MEMORY, began="2026-11-01T00:00:00+00:00")
        success = recorded_trial(FAST, 20.0, began="2026-11-02T00:00:00+00:00")
        assert refused(FAST, kept(success), kept(shortage, id="b")) is None
        again = recorded_trial(FAST, OUT_OF_MEMORY, began="2026-11-03T00:00:00+00:00")
        assert refused(FAST, kept(again), kept(success, id="b")) is not None

    @pytest.mark.parametrize(("peak", "is_refused"), [(7.9, False), (8.05, False), (8.2, True)])
    def test_a_peak_beyond_the_budget_is_refused_where_it_is_beyond_the_noise(self, peak, is_refused):
        measured = make_measurement(20.0, memory=Memory(resident_bytes=int(peak * GIB)))
        said = f"took {peak:.2f} GiB on {DAY} (record)" if is_refused else None
        assert refused(FAST, kept(recorded_trial(FAST, measured))) == said

    def test_of_a_gpu_what_the_allocator_kept_unused_does_not_count(self):
        plan = make_plan(hardware=make_gpu(), space=make_space_file(PARAMETERS))
        memory = Memory(allocated_bytes=7 * GIB, reserved_bytes=9 * GIB, device_bytes=int(9.5 * GIB))
        tight = kept(recorded_trial(FAST, make_measurement(20.0, memory=memory)), plan=plan)
        assert refused(FAST, tight, plan=plan) is None
        less = plan.model_copy(update={"memory_bytes": 7 * GIB})
        assert refused(FAST, tight, plan=less) == f"took 7.50 GiB on {DAY} (record)"


class TestTheOldWinner:
    def test_it_is_asked_for_once_the_baseline_is_known(self):
        assert after(TYPICAL).winner is None
        assert after(TYPICAL, now=[(BASE, 10.0)]).winner == FAST
        empty = after(now=[(BASE, 10.0)])
        assert (empty.winner, empty.note, empty.refusal(SECOND, None)) == (None, None, None)

    @pytest.mark.parametrize(
        ("rate", "verdict", "winner"),
        [(19.5, "faster", SECOND), (19.5, "unconfirmed", FAST), (15.0, "faster", FAST)],
        ids=["single trials can't tell", "not measured again", "clearly faster than the answer"],
    )
    def test_it_is_the_answer_unless_another_was_clearly_faster(self, rate, verdict, winner):
        answered = {"verdict": verdict, "best_config_id": SECOND.config_id}
        search, later = kept(recorded_trial(SECOND, rate), **answered), kept(recorded_trial(FAST, 20.0), id="b")
        assert after(later, search, now=[(BASE, 10.0)]).winner == winner

    def test_where_the_baseline_won_it_is_what_came_next(self):
        search = kept(recorded_trial(SECOND, 9.0), verdict="no_clear_winner", best_config_id=BASE.config_id)
        earlier = after(search, now=[(BASE, 10.0)])
        assert earlier.winner == SECOND
        assert f"next is the fastest beside the baseline of {DAY}" in earlier.note

    @pytest.mark.parametrize(
        "change",
        [
            {"allowance": Allowance.EXACT},
            {"space": make_space_file({**PARAMETERS, "precision": ["fp32"]})},
            {"memory_bytes": GIB - GIB // 10},
            {"space": make_space_file(PARAMETERS, [{"forbid": {"precision": ["bf16"]}, "reason": "no"}])},
        ],
        ids=["allowance", "choices", "memory", "rules"],
    )
    def test_what_this_search_may_not_try_is_not_asked_for(self, change):
        fits = make_measurement(12.0, memory=Memory(resident_bytes=GIB // 2))
        checkpointed = make_config(16, checkpointing="full")
        search = kept(recorded_trial(FAST, 20.0), recorded_trial(checkpointed, fits))
        plan = PLAN.model_copy(update=change)
        assert after(search, plan=plan, now=[(BASE, 10.0)]).winner == checkpointed

    def test_rates_of_several_searches_are_compared_by_their_baselines(self):
        slow_day = kept(recorded_trial(BASE, 5.0, purpose=Purpose.BASELINE), recorded_trial(FAST, 10.0))
        fast_day = kept(recorded_trial(SECOND, 15.0), id="b")
        assert after(fast_day, slow_day, now=[(BASE, 10.0)]).winner == FAST

    def test_a_compiled_one_counts_for_what_the_run_makes_of_it(self):
        compiled = make_config(8, torch_compile_backend="inductor")
        space = make_space_file({"torch_compile_backend": [None, "inductor"], "precision": ["fp32", "bf16"]})
        plan = make_plan(space=space, objective=Objective(run_samples=100.0))
        slow_start = make_measurement(30.0, first_step_s=60.0)
        search = kept(recorded_trial(compiled, slow_start), recorded_trial(SECOND, 15.0), plan=plan)
        assert after(search, plan=plan, now=[(BASE, 10.0)]).winner == SECOND


class TestWhatIsNotMeasuredAgain:
    @pytest.mark.parametrize(
        ("base", "fast", "is_refused"),
        [(5.0, 10.0, True), (10.0, 20.0, True), (30.0, 60.0, True), (10.0, 13.0, False), (10.0, CRASHED, False)],
        ids=str,
    )
    def test_what_was_no_faster_than_the_leader_is_at_the_present_speed(self, base, fast, is_refused):
        said = f"gave 15 samples/s on {DAY} (record)" if is_refused else None
        assert refused(SECOND, TYPICAL, now=[(BASE, base), (FAST, fast)]) == said

    def test_without_a_baseline_in_common_rates_are_compared_as_they_are(self):
        other = make_config(2)
        search = kept(recorded_trial(other, 3.0, purpose=Purpose.BASELINE), recorded_trial(FAST, 20.0))
        assert refused(other, search, now=[(BASE, OUT_OF_MEMORY), (FAST, 20.5)]) is not None
        assert refused(other, search, now=[(BASE, 2.0)]) is None

    def test_what_crashed_is_not_tried_again_once_something_has_completed_and_is_no_winner(self):
        search = kept(recorded_trial(make_config(1), CRASHED))
        assert refused(make_config(1), search) is None
        assert refused(make_config(1), search, now=[(BASE, 10.0)]) == f"crashed on {DAY} (record)"
        earlier = after(search, now=[(BASE, 10.0)])
        assert earlier.winner is None
        assert "next is" not in earlier.note

    @pytest.mark.parametrize(
        ("took_s", "now", "is_refused"),
        [(41.0, 10.0, True), (39.0, 10.0, False), (59.0, TIMED_OUT, False), (61.0, TIMED_OUT, True)],
        ids=["beyond", "within", "within the limit alone", "beyond the limit"],
    )
    def test_what_did_not_end_in_the_time_that_a_trial_has_is_not_tried_again(self, took_s, now, is_refused):
        """A trial may take 60 s, and 40 s beside a leader that took 10 s; what takes longer is ended."""
        plan, slow = PLAN.model_copy(update={"budget": make_budget(trial_timeout_s=60.0)}), make_config(2)
        search = kept(recorded_trial(slow, TIMED_OUT, duration_s=took_s))
        said = f"did not end within {took_s:.0f} s on {DAY} (record)" if is_refused else None
        assert refused(slow, search, plan=plan, now=[(BASE, now)]) == said


class TestLessons:
    def rates(self, *searches, base: float = 10.0) -> dict[TrainConfig, float]:
        lessons = EarlierSearches(PLAN, searches).compare(history_of((BASE, base)))
        return {r.request.config: r.measurement.samples_per_second for r in lessons if r.measurement}

    def test_they_come_once_at_the_speed_that_the_machine_has_now(self):
        assert self.rates(TYPICAL, base=5.0) == {FAST: 10.0, SECOND: 7.5}
        earlier = EarlierSearches(PLAN, [TYPICAL])
        assert earlier.compare(history_of((BASE, 10.0)))
        assert earlier.compare(history_of((BASE, 10.0), (FAST, 20.0))) == []
        assert earlier.note is not None

    def test_rates_beside_others_that_took_the_machine_are_neither_lessons_nor_refusals(self):
        noisy = make_measurement(5.0, conditions=Conditions(others_share=0.5))
        search = kept(recorded_trial(FAST, noisy), recorded_trial(SECOND, 15.0))
        assert self.rates(search) == {SECOND: 15.0}
        assert refused(FAST, search, now=[(BASE, 10.0)]) is None

    def test_of_very_many_the_latest_are_learned(self, monkeypatch):
        monkeypatch.setattr("autotune.search.earlier._MOST_LESSONS", 1)
        early, late = kept(recorded_trial(FAST, 18.0)), kept(recorded_trial(SECOND, 15.0), id="b")
        assert self.rates(late, early) == {SECOND: 15.0}

    def test_a_shortage_keeps_the_budget_it_met(self):
        search = kept(recorded_trial(FAST, OUT_OF_MEMORY, memory_bytes=3 * GIB))
        (lesson,) = EarlierSearches(PLAN, [search]).compare(history_of((BASE, 10.0)))
        assert lesson.request.limits.memory_bytes == 3 * GIB

    def test_the_latest_search_is_believed_and_of_repeats_the_middle_one_but_nothing_impossible(self):
        early = kept(recorded_trial(FAST, 18.0))
        odd = recorded_trial(make_config(3), 20.0)  # does not divide the global batch
        late = kept(odd, *(recorded_trial(FAST, rate) for rate in (26.0, 20.0, 5.0)), id="b")
        assert self.rates(late, early) == {FAST: 20.0}


class Searches:
    """Searches of one machine, one after the other, with a record in a real database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = Record(folder / "record.journal")
        self.speed = 1.0
        self.guided = True
        self.bonus: dict[TrainConfig, float] = {}
        self.started: dict[str, str] = {}
        self.model = make_model_of([profile_of(*kind, kept=MB) for kind in KINDS])

    def outcome(self, request: TrialRequest):
        if request.limits.memory_bytes < 8 * GIB and request.config.checkpointing == "none":
            return OUT_OF_MEMORY
        rate = self.model.estimate(request.config).samples_per_second
        return rate * self.speed * self.bonus.get(request.config, 1.0)

    def remember(self, *configs: TrainConfig, winner: TrainConfig, memory_bytes: int = 8 * GIB) -> None:
        """Keep an earlier search that tried these, at what the machine gives now."""
        found = []
        for config in (BASE, *configs):
            outcome = self.outcome(make_request(config, limits=make_limits(memory_bytes=memory_bytes)))
            purpose = Purpose.BASELINE if config == BASE else Purpose.SEARCH
            found.append(recorded_trial(config, outcome, memory_bytes=memory_bytes, purpose=purpose))
        keep(self.database, kept(*found, verdict="faster", best_config_id=winner.config_id))

    def run(self, name: str, *, stop_after: int | None = None, **fields):
        """Run the search in this folder, or go on with it; return its answer and the configurations it explored."""
        fields = {"space": make_space_file(PARAMETERS), "allowance": Allowance.OPTIMIZER, **fields}
        # The plan of a search that goes on, which in a later minute would be another search's.
        plan = make_plan(search_id=name, started=self.started.setdefault(name, now()), **fields)
        directory = RunDirectory(self.folder / name)
        directory.path.mkdir(exist_ok=True)
        runner, self.heard = ScriptedRunner(directory.path, interrupted(self.outcome, stop_after)), Heard()
        writer = RecordWriter(self.database, plan, directory, self.heard)
        earlier = EarlierSearches(plan, writer.earlier())
        model = self.model if self.guided else None
        answer = Tuner(plan, directory, runner, writer, model=model, earlier=earlier).run()
        writer.end(answer)
        return answer, runner.searched


@pytest.fixture
def searches(tmp_path) -> Searches:
    return Searches(tmp_path)


def test_a_known_search_is_its_baseline_and_its_old_winner_even_if_it_is_stopped(searches):
    first, explored = searches.run("first")
    assert len(explored) > 2
    with pytest.raises(SearchInterrupted):
        searches.run("second", stop_after=2)
    second, again = searches.run("second")
    assert again == []
    measured = RunDirectory(searches.folder / "second").results()
    assert [r.request.config for r in measured if r.request.purpose.explores] == [BASE, first.best.config]
    assert (second.best.config, second.verdict) == (first.best.config, "faster")
    assert "are left untried" in searches.heard.notes[-1]


def test_the_answer_knows_only_what_was_measured_now(searches):
    searches.remember(FAST, SECOND, make_config(4, precision="bf16"), make_config(16), winner=FAST)
    searches.speed = 0.7
    answer, explored = searches.run("second")
    assert explored == [BASE, FAST]
    assert {t.config for t in answer.trials if t.samples_per_second is not None} == set(explored)
    assert all(found.config in explored for found in (answer.best, *answer.runners_up))
    rate = searches.outcome(make_request(FAST))
    assert answer.best.measurement.samples_per_second == pytest.approx(rate)
    assert any("the record knows 5 configurations" in note for note in answer.notes)


def test_where_the_old_winner_is_no_longer_one_the_search_goes_on_as_usual(searches):
    searches.remember(FAST, SECOND, make_config(16), winner=FAST)
    searches.bonus = {FAST: 0.3}
    answer, explored = searches.run("second")
    assert explored[:2] == [BASE, FAST]
    assert len(explored) > 2
    assert answer.best.config not in (BASE, FAST)


def test_a_smaller_budget_is_refused_from_the_record(searches):
    lightest = make_config(1, precision="bf16", optim="adafactor")
    searches.remember(lightest, winner=lightest, memory_bytes=6 * GIB)
    answer, explored = searches.run("second", memory_bytes=5 * GIB)
    hard = [c for c in explored if c.precision == "bf16" and c.checkpointing == "none"]
    assert hard == [FAST]  # which alone accumulates nothing
    refused = {t.config: t.cause for t in answer.trials if t.status is TrialStatus.REJECTED}
    short = f"ran out of memory within 6.00 GiB on {DAY} (record)"
    assert refused[SECOND] == f"a configuration no harder on memory {short}"
    assert answer.best.config.checkpointing == "full"


def test_a_search_that_is_gone_on_with_does_not_learn_from_itself(searches):
    with pytest.raises(SearchInterrupted):
        searches.run("first", stop_after=2)
    assert [len(s.trials) for s in searches.database.searches()] == [2]
    _, explored = searches.run("first")
    assert not any("record" in note for note in searches.heard.notes)
    assert BASE not in explored
    assert len(searches.database.searches()) == 1


def test_what_is_untried_and_promising_is_tried_all_the_same(searches):
    searches.remember(make_config(16), make_config(4), winner=make_config(16))  # bf16 was not allowed
    answer, explored = searches.run("second")
    assert explored[:2] == [BASE, make_config(16)]
    assert answer.best.config.precision == "bf16"


def test_without_a_prediction_what_the_record_knows_is_not_tried_again(searches):
    searches.remember(FAST, SECOND, make_config(16), make_config(4), winner=FAST)
    searches.guided = False
    answer, explored = searches.run("second", budget=make_budget(max_trials=4))
    assert explored[:2] == [BASE, FAST]
    assert not {SECOND, make_config(16), make_config(4)} & set(explored)
    assert answer.best.config == FAST
