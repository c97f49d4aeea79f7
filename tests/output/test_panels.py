"""The charts of a report with their legends, and the picture of them all."""

import pytest
from finished_searches import make_report

from autotune.output.drawing import styled
from autotune.output.panels import panels, png_report, time_bars
from autotune.values.time_spent import Spent


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return make_report(tmp_path_factory.mktemp("search") / "run")


@pytest.fixture(autouse=True)
def style():
    with styled("light"):
        yield


@pytest.mark.parametrize("width", [346.0, 620.0])
def test_a_legend_names_all_that_is_drawn_and_stays_inside_below_it(report, width):
    for panel in panels(report):
        chart = panel.draw(width)
        for legend in chart.legends:
            shown = {text.get_text().replace("\n", " ") for text in legend.get_texts()}
            assert shown == set(chart.axes[0].get_legend_handles_labels()[1])
            chart.canvas.draw()
            box = legend.get_window_extent()
            assert (box.x0, box.y0) >= (0, 0)
            assert box.x1 <= width + 1
            assert box.y1 <= chart.axes[0].get_window_extent().y0


def test_all_charts_but_those_of_bars_with_words_have_a_legend(report):
    without = {panel.name for panel in panels(report) if not panel.draw(620.0).legends}
    assert without == {"alive", "time"}


def test_a_picture_is_drawn(report):
    picture = png_report(report)
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert width == 1968
    assert height > 1500
    assert picture == png_report(report)


def test_a_picture_of_a_search_without_an_answer_is_drawn(report):
    nothing = report.model_copy(
        update={"result": None, "explanation": None, "nothing": "none", "trials": (), "breakdowns": ()}
    )
    assert png_report(nothing).startswith(b"\x89PNG")


def test_the_longest_takes_all_of_the_width():
    parts = ("first_steps_s", "warm_up_s", "measured_s", "checks_s", "trials_overhead_s", "lost_s", "own_s")
    nothing = Spent(**dict.fromkeys(parts, 0.0), overhead_per_trial_s=None)
    spent = nothing.model_copy(update={"first_steps_s": 10.0, "measured_s": 30.0, "trials_overhead_s": 5.0})
    axes = time_bars(spent, 346.0).axes[0]
    shares = [bar.get_width() / axes.get_xlim()[1] for bar in axes.patches]
    assert shares == pytest.approx([1, 1 / 3, 1 / 6])
    assert time_bars(nothing, 346.0) is None
