"""Charts: who is on the front, where the budget is, the best so far, factors of knobs; colours for every eye."""

import re
import warnings
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest
from answers import BF16, BIG, answer, report_of
from factories import make_budget, make_config
from factories import make_contribution as part
from finished_searches import BASE, BEST, make_report, outcome

from autotune.output import charts
from autotune.units import GIB
from autotune.values.result import Explanation
from autotune.values.trial import Interval, Purpose

EVIL = '</text><script>"&$x^2$ \u202e \u6a21'


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return make_report(tmp_path_factory.mktemp("search") / "run")


def lines(chart, words: str):
    """The lines and marks of a chart whose entry in the legend begins with these words."""
    return [line for line in chart.axes[0].lines if str(line.get_label()).startswith(words)]


def marks(chart, words: str):
    return [line for line in lines(chart, words) if line.get_gid()]


def spot(rate: float, peak: int) -> charts.Spot:
    return charts.Spot(make_config(peak), rate, peak, "", is_once=False)


def test_the_front_is_who_is_fastest_with_as_little_memory():
    found = [spot(10, 4), spot(12, 4), spot(8, 2), spot(7, 3), spot(20, 9)]
    assert [(s.rate, s.peak) for s in charts.pareto(found)] == [(8, 2), (12, 4), (20, 9)]


def test_a_configuration_is_one_spot_however_often_it_ran(report):
    found = {s.config: s for s in charts.spots(report)}
    assert found[BEST].rate == pytest.approx(19.8)
    assert found[BEST].peak == 2 * GIB
    labels = ", ".join(t.label for t in report.trials if t.config == BEST and t.is_compared)
    assert found[BEST].tip.endswith(f"trial {labels}")
    later = {"purpose": Purpose.EXPLAIN, "samples_per_second": 1.0}  # to explain the winner, on another day
    slow = [report.trials[0].model_copy(update={**later, "config": c}) for c in (BEST, make_config(4))]
    assert charts.spots(report.model_copy(update={"trials": (*report.trials, *slow)})) == charts.spots(report)


def test_a_finalist_has_the_rate_of_the_answers_table_and_not_of_its_lucky_trial():
    searched = [(BASE, 10.0), (BIG, 56.0), (BF16, 55.0)]
    result = answer(searched, [(BASE, 10.0), (BIG, 10.2), (BF16, 20.0)] * 2, budget=make_budget(finalists=3))
    rates = {s.config: s.rate for s in charts.spots(report_of(result))}
    contenders = [result.baseline, result.best, *result.runners_up]
    assert rates == {c.config: c.measurement.samples_per_second for c in contenders}
    assert (len(rates), rates[BIG]) == (3, pytest.approx(10.2))


def test_who_was_faster_than_the_winner_in_a_single_trial_is_not_on_the_front():
    searched = [(BASE, 10.0), (BIG, 50.0), (BF16, 49.0)]
    result = answer(searched, [(BASE, 10.0), (BIG, 20.0)] * 2, budget=make_budget(finalists=1))
    chart = charts.throughput_against_memory(report_of(result))
    assert len(marks(chart, "Pareto front")) == 0
    (lucky,) = marks(chart, "other")
    assert lucky.get_gid().endswith("measured once")


def test_baseline_winner_and_budget_are_marked_among_all_that_completed(report, tmp_path):
    chart = charts.throughput_against_memory(report)
    assert len(marks(chart, "winner")) == len(marks(chart, "baseline")) == 1
    others = len(marks(chart, "other")) + len(marks(chart, "Pareto front"))
    assert others == len(charts.spots(report)) - 2
    (budget,) = lines(chart, "memory budget")
    assert budget.get_xdata()[0] == 8
    lacking = [t for t in report.trials if t.status == "out of memory"]
    assert len(marks(chart, "ran out of memory")) == len(lacking) > 0
    far = charts.throughput_against_memory(make_report(tmp_path / "run", outcome))
    assert not lines(far, "memory budget")
    assert far.axes[0].get_title(loc="right") == "budget 8.00 GiB, further right"


def test_the_best_so_far_rises_until_the_finals_and_is_then_the_winners():
    result = answer([(BASE, 20.0), (BF16, 60.0), (BIG, 80.0)], [(BASE, 21.0), (BIG, 21.7)] * 2)
    found = report_of(result)
    finals = [t for t in found.trials if t.purpose is Purpose.FINAL]
    ((line,), winner) = lines(charts.best_over_time(found), "best so far"), result.best.measurement.samples_per_second
    assert list(line.get_ydata()) == [20.0, 60.0, 80.0, winner, winner]
    assert line.get_xdata()[-2] == line.get_xdata()[-1] == finals[-1].ended_s


def test_every_trial_of_the_search_is_on_the_line_of_time(report):
    chart = charts.best_over_time(report)
    explored = [t for t in report.trials if t.purpose is not None and t.purpose.explores]
    completed = [t for t in explored if t.samples_per_second]
    assert len(marks(chart, "a trial of the search")) == len(completed)
    assert len(marks(chart, "failed")) == len(explored) - len(completed)
    assert len(marks(chart, "a trial of the finals")) == sum(t.purpose == "final" for t in report.trials)


@pytest.mark.parametrize("chart", [charts.throughput_against_memory, charts.best_over_time])
def test_where_nothing_completed_nothing_is_drawn(report, chart):
    assert charts.svg(lambda: chart(report.model_copy(update={"trials": (), "result": None})), "chart") == ""


def test_each_knob_has_a_bar_from_1_to_its_factor_with_the_interval_where_it_is_narrow():
    parts = (
        part("precision", 2.0, interval=Interval(low=1.9, high=2.1)),
        part("optim", 0.8, "once"),
        part("tf32", 3.0, interval=Interval(low=0.09, high=469.0)),  # couldn't tell
        part("checkpointing", None, "fails", cause="no memory"),
    )
    rates = {"winner_samples_per_second": 30.0, "baseline_samples_per_second": 10.0}
    found = Explanation(winner=make_config(), **rates, total=3.0, contributions=parts)
    axes = charts.contributions(found).axes[0]
    assert [(bar.get_x(), round(bar.get_width(), 6)) for bar in axes.patches] == [(1, 1.0), (1, -0.2)]
    texts = ["precision a → b", "2.00 (1.90 to 2.10)", "optim a → b", "0.80 (0.72 to 0.88)"]
    assert [text.get_text() for text in axes.texts] == texts
    ends = [bars.get_segments()[0][:, 0].tolist() for bars in axes.collections]
    assert ends[0] == pytest.approx([1.9, 2.1])
    assert charts.contributions(found.model_copy(update={"contributions": parts[2:]})) is None


def drawn(words: str = "a mark"):
    figure = mpl.figure.Figure(label=words)
    figure.add_subplot(title=words).plot(0.5, 0.5, gid=f"tip:{words}")
    return figure


def test_a_chart_is_a_labelled_picture_whose_texts_stay_texts():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = charts.svg(lambda: drawn(EVIL), "chart")
    found = ET.fromstring(text)
    assert (found.get("role"), found.get("aria-label")) == ("img", EVIL.replace("\u202e", "\\u202e"))
    assert EVIL in [e.text for e in found.iter("text")]
    assert [e.text for e in found.iter("title")] == [EVIL]
    assert not list(found.iter("script"))


def test_the_same_chart_is_the_same_text_whatever_the_users_settings_and_no_id_is_of_two_charts():
    found = [charts.svg(drawn, name) for name in ("a", "b")]
    ids = [found_id for each in found for found_id in re.findall(r' id="([^"]*)"', each)]
    assert len(ids) == len(set(ids)) > 0
    with mpl.rc_context({"font.size": 40, "axes.grid": False, "svg.fonttype": "path"}):
        mine = dict(mpl.rcParams)
        assert charts.svg(drawn, "a") == found[0]
        assert dict(mpl.rcParams) == mine
