"""What a report says in words and rows."""

import pytest
from finished_searches import make_report

from autotune.output.report_facts import accuracy, answer, explained, state, time_rows
from autotune.values.time_spent import Spent


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return make_report(tmp_path_factory.mktemp("search") / "run")


def test_the_answer_is_a_sentence(report):
    assert answer(report).startswith("1.98 x as fast as your baseline (1.9")
    assert answer(report).endswith(" x): micro-batch 16, precision bf16, optim adamw_torch.")


def test_what_was_not_run_in_turn_says_how_to_get_it(report):
    assert f"`autotune explain {report.run_directory}` measures it" in explained(report)


def test_the_state_says_what_ran(report):
    ran = sum(t.purpose is not None for t in report.trials)
    refused = len(report.trials) - ran
    assert state(report).startswith(f"{ran} trials in ")
    assert f"{refused} configurations refused without one" in state(report)
    assert "2 running" in state(report.model_copy(update={"is_running": True, "unfinished": 2}))
    assert "2 begun and not finished" in state(report.model_copy(update={"unfinished": 2}))


def test_errors_of_predictions_are_shares_of_the_measured(report):
    compared = sum(t.is_compared for t in report.trials)
    throughput, memory = accuracy(report)
    assert throughput.startswith("throughput: median error 10%, largest +10% (trial ")
    assert f"of {compared} predictions" in throughput
    assert memory.startswith("peak memory: median error ")
    assert accuracy(report.model_copy(update={"trials": ()})) == []


def test_the_longest_kind_of_work_comes_first(report):
    parts = ("first_steps_s", "warm_up_s", "measured_s", "checks_s", "trials_overhead_s", "lost_s", "own_s")
    nothing = Spent(**dict.fromkeys(parts, 0.0), overhead_per_trial_s=None)
    spent = nothing.model_copy(update={"first_steps_s": 10.0, "measured_s": 30.0, "trials_overhead_s": 5.0})
    rows = time_rows(report.model_copy(update={"spent": spent}))
    assert [share for _, _, share in rows] == ["67%", "22%", "11%"]
    assert time_rows(report.model_copy(update={"spent": nothing})) == []
