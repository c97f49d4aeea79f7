"""Charts: who is on the front, where the budget is, the best so far, and a waterfall from baseline to winner."""

import itertools

import pytest
from answers import BF16, BIG, answer
from factories import make_budget, make_config
from factories import make_contribution as part
from finished_searches import BASE, BEST, make_report, outcome

from autotune.output.chart_style import styled
from autotune.output.charts import (
    Spot,
    best_over_time,
    best_so_far,
    pareto,
    spots,
    throughput_against_memory,
    waterfall,
    waterfall_steps,
)
from autotune.output.report import report_of
from autotune.units import GIB
from autotune.values.result import Contribution, Explanation
from autotune.values.trial import Interval, Purpose

WIDTHS = (346.0, 620.0)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return make_report(tmp_path_factory.mktemp("search") / "run")


@pytest.fixture(autouse=True)
def style():
    with styled():
        yield


def lines(chart, words: str):
    """The lines and marks of a chart whose entry in the legend begins with these words."""
    return [line for line in chart.axes[0].lines if str(line.get_label()).startswith(words)]


def marks(chart, words: str):
    return [line for line in lines(chart, words) if line.get_gid()]


def at(line) -> tuple[float, float]:
    return float(line.get_xdata()[0]), float(line.get_ydata()[0])


def spot(rate: float, peak: int) -> Spot:
    return Spot(make_config(peak), rate, peak, "", is_once=False)


def test_the_front_is_who_is_fastest_with_as_little_memory():
    found = [spot(10, 4), spot(12, 4), spot(8, 2), spot(7, 3), spot(20, 9)]
    assert [(s.rate, s.peak) for s in pareto(found)] == [(8, 2), (12, 4), (20, 9)]


def test_a_configuration_is_one_spot_however_often_it_ran(report):
    found = {s.config: s for s in spots(report)}
    assert found[BEST].rate == pytest.approx(19.8)
    assert found[BEST].peak == 2 * GIB
    assert found[BEST].tip.endswith(
        f"trial {', '.join(t.label for t in report.trials if t.config == BEST and t.is_compared)}"
    )


def test_a_finalist_has_the_rate_of_the_answers_table_and_not_of_its_lucky_trial():
    searched = [(BASE, 10.0), (BIG, 56.0), (BF16, 55.0)]
    result = answer(searched, [(BASE, 10.0), (BIG, 10.2), (BF16, 20.0)] * 2, budget=make_budget(finalists=3))
    rates = {s.config: s.rate for s in spots(report_of(result))}
    contenders = [result.baseline, result.best, *result.runners_up]
    assert len(rates) == len(contenders) == 3
    for contender in contenders:
        assert rates[contender.config] == contender.measurement.samples_per_second
    assert rates[BIG] == pytest.approx(10.2)
    rows = (t.model_copy(update={"config_samples_per_second": None}) for t in result.trials)  # of an older version
    old = report_of(result.model_copy(update={"trials": tuple(rows)}))
    assert {s.config: s.rate for s in spots(old)}[BIG] == pytest.approx(10.2)


def test_who_was_faster_than_the_winner_in_a_single_trial_is_not_on_the_front():
    searched = [(BASE, 10.0), (BIG, 50.0), (BF16, 49.0)]
    result = answer(searched, [(BASE, 10.0), (BIG, 20.0)] * 2, budget=make_budget(finalists=1))
    chart = throughput_against_memory(report_of(result), 620.0)
    assert len(marks(chart, "Pareto front")) == 0
    (lucky,) = marks(chart, "other")
    assert lucky.get_gid().endswith("measured once")


def test_trials_to_explain_the_winner_are_of_another_day(report):
    later = {"purpose": Purpose.EXPLAIN, "samples_per_second": 1.0}
    slow = [report.trials[0].model_copy(update={**later, "config": c}) for c in (BEST, make_config(4))]
    assert spots(report.model_copy(update={"trials": (*report.trials, *slow)})) == spots(report)


@pytest.mark.parametrize("width", WIDTHS)
def test_baseline_and_best_are_marked_among_all_that_completed(report, width):
    chart = throughput_against_memory(report, width)
    assert len(marks(chart, "winner")) == len(marks(chart, "baseline")) == 1
    others = len(marks(chart, "other")) + len(marks(chart, "Pareto front"))
    assert others == len(spots(report)) - 2
    assert len(lines(chart, "memory budget")) == 1
    lacking = [t for t in report.trials if t.status == "out of memory"]
    assert len(marks(chart, "ran out of memory")) == len(lacking) > 0


def test_a_budget_far_off_is_beyond_a_break_of_the_axis(tmp_path):
    report = make_report(tmp_path / "run", outcome)
    chart = throughput_against_memory(report, 620.0)
    (budget,) = lines(chart, "memory budget")
    assert budget.get_transform() == chart.axes[0].transAxes
    assert at(budget)[0] > 1  # beyond the right end
    assert "budget 8.00 GiB" in [text.get_text() for text in chart.axes[0].texts]
    near = report.model_copy(update={"memory_bytes": int(2.1 * GIB)})
    (line,) = lines(throughput_against_memory(near, 620.0), "memory budget")
    assert at(line)[0] == pytest.approx(2.1)


def test_the_best_so_far_rises_until_the_finals_and_is_then_the_winners():
    result = answer([(BASE, 20.0), (BF16, 60.0), (BIG, 80.0)], [(BASE, 21.0), (BIG, 21.7)] * 2)
    found = report_of(result)
    searched = [t for t in found.trials if t.is_compared and t.purpose is not Purpose.FINAL]
    finals = [t for t in found.trials if t.purpose is Purpose.FINAL]
    line = best_so_far(found, searched, finals, 99.0)
    assert [rate for _, rate in line[:3]] == [20.0, 60.0, 80.0]
    assert line[3] == (finals[-1].ended_s, result.best.measurement.samples_per_second)
    assert line[-1] == (99.0, result.best.measurement.samples_per_second)


def test_every_trial_of_the_search_is_on_the_line_of_time(report):
    chart = best_over_time(report, 620.0)
    explored = [t for t in report.trials if t.purpose is not None and t.purpose.explores]
    completed = [t for t in explored if t.samples_per_second]
    assert len(marks(chart, "a trial of the search")) == len(completed)
    assert len(marks(chart, "failed")) == len(explored) - len(completed)
    again = len(marks(chart, "the winner, measured again")) + len(marks(chart, "the baseline, measured again"))
    assert again == sum(t.purpose == "final" for t in report.trials)


def test_where_nothing_completed_nothing_is_drawn(report):
    empty = report.model_copy(update={"trials": (), "result": None})
    assert throughput_against_memory(empty, 620.0) is None
    assert best_over_time(empty, 620.0) is None


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_is_drawn_inside(report, width):
    for chart in (throughput_against_memory(report, width), best_over_time(report, width)):
        axes = chart.axes[0]
        for line in axes.lines:
            if line.get_gid():
                x, y = axes.transAxes.inverted().transform(line.get_transform().transform(at(line)))
                assert -0.01 <= x <= 1.01
                assert -0.01 <= y <= 1.01


def explained(*parts: Contribution, baseline: float | None = 10.0, total: float | None = 3.0) -> Explanation:
    return Explanation(
        winner=make_config(),
        winner_samples_per_second=30.0,
        baseline_samples_per_second=baseline,
        total=total,
        contributions=parts,
    )


def test_a_waterfall_leads_from_baseline_to_winner():
    steps = waterfall_steps(explained(part("precision", 2.0), part("optim", 1.2)))
    assert [(round(s.start, 6), round(s.end, 6)) for s in steps] == [(10.0, 20.0), (20.0, 24.0), (24.0, 30.0)]
    assert [s.words for s in steps] == ["precision a → b", "optim a → b", "together"]
    back = waterfall_steps(explained(part("precision", 4.0, "once"), part("optim", 1.5)))
    assert [s.kind for s in back] == ["gain weak", "gain", "rest loss"]
    assert back[-1].end == pytest.approx(30.0)


def test_a_knob_whose_factor_is_not_sure_has_no_whisker_and_without_one_words_for_a_bar():
    told, *_ = waterfall_steps(explained(part("precision", 3.0)))
    assert (told.kind, told.low, told.high) == ("gain", pytest.approx(27.0), pytest.approx(33.0))
    (step,) = waterfall_steps(explained(part("precision", 3.0, interval=Interval(low=0.09, high=469.0))))
    assert (step.kind, step.value, step.low, step.high) == ("gain weak", "couldn't tell", None, None)
    needed = waterfall_steps(explained(part("precision", 3.0), part("checkpointing", None, "fails", cause="no memory")))
    assert (needed[1].value, needed[1].start, needed[1].tip) == ("needed", None, "no memory")
    assert waterfall(explained(part("precision", None, "unknown"), total=None), 620.0) is None


def test_without_a_baseline_each_bar_ends_at_the_winner():
    steps = waterfall_steps(explained(part("precision", 2.0), part("optim", 1.5), baseline=None, total=None))
    assert [(s.start, s.end) for s in steps] == [(15.0, 30.0), (20.0, 30.0)]


@pytest.mark.parametrize("width", WIDTHS)
def test_bars_join_where_the_last_one_ended(width):
    axes = waterfall(explained(part("precision", 2.0), part("optim", 1.2)), width).axes[0]
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert len(ends) == 3
    for (_, end), (start, _) in itertools.pairwise(ends):
        assert start == pytest.approx(end)
    assert axes.get_xscale() == "log"
    assert len([line for line in axes.lines if "interval" in (line.get_gid() or "")]) == 2
