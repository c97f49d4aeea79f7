"""What is told of a search: the leader beside the baseline."""

import pytest
from factories import OUT_OF_MEMORY, Clock, make_budget, make_config, make_measurement, make_plan, make_result

from autotune.planning.plan import SearchState
from autotune.search.progress import Pace, leader_of
from autotune.values.problem import Leader
from autotune.values.trial import Memory, Purpose
from autotune.verification.checks import Check
from autotune.verification.finals import Finals
from autotune.verification.verdict import assemble

BASE, FAST, OTHER = make_config(), make_config(16), make_config(4)


class Told:
    """A search whose trials a test takes in one by one."""

    def __init__(self) -> None:
        self.plan = make_plan(baseline=BASE, budget=make_budget(finalists=1, final_rounds=2))
        self.state = SearchState(self.plan)
        self.finals = Finals(self.state)

    def ended(self, config, outcome=10.0, purpose=Purpose.SEARCH) -> Leader | None:
        """Take in a trial and return the leader then."""
        result = make_result(config, outcome, purpose=purpose, number=len(self.state.results))
        self.state.take_in(result)
        return leader_of(self.finals)


@pytest.fixture
def told() -> Told:
    return Told()


def test_the_leader_is_the_fastest_of_the_search_beside_the_baseline(told):
    told.ended(BASE, 10.0)
    told.ended(FAST, 25.0)
    leader = told.ended(OTHER, 20.0)
    assert [(c.knob, c.after) for c in leader.changes] == [("per_device_train_batch_size", "16")]
    assert (leader.samples_per_second, leader.speedup) == (25.0, 2.5)


def test_beside_a_baseline_that_did_not_complete_there_is_no_speedup(told):
    assert told.ended(BASE, OUT_OF_MEMORY) is None
    assert told.ended(FAST, 25.0).speedup is None


def test_the_best_is_revised_when_the_finals_put_it_lower(told):
    told.ended(BASE, 20.0)
    told.ended(FAST, 80.0)
    assert leader_of(told.finals).samples_per_second == 80.0
    for _ in range(2):
        told.ended(BASE, 21.0, Purpose.FINAL)
        told.ended(FAST, 21.7, Purpose.FINAL)
    answer = assemble(told.finals, 60.0)
    assert leader_of(told.finals).samples_per_second == answer.best.measurement.samples_per_second < 22.0


def test_a_leader_that_fails_its_final_leads_no_more(told):
    told.ended(BASE, 10.0)
    told.ended(OTHER, 20.0)
    told.ended(FAST, 25.0)
    leader = told.ended(FAST, OUT_OF_MEMORY, Purpose.FINAL)
    assert [c.after for c in leader.changes] == ["4"]


def test_a_soak_has_time_to_write_what_the_training_holds_to_a_slow_disk():
    state = SearchState(make_plan(baseline=BASE, budget=make_budget(trial_timeout_s=100.0, max_time_s=3600.0)))
    state.take_in(
        make_result(BASE, make_measurement(memory=Memory(resident_bytes=30 * 10**9)), purpose=Purpose.BASELINE)
    )
    pace, check = Pace(Finals(state), Clock()), Check(BASE, Purpose.SOAK, None, 10.0)
    assert pace.timeout_s(BASE, Purpose.FINAL, check) == 100.0
    assert pace.timeout_s(BASE, Purpose.SOAK, check) == pytest.approx(400.0)
