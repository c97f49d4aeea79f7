"""The picture: the charts of the page and the answer, with colours that need no style sheet."""

import re
import xml.etree.ElementTree as ET

import pytest
from finished_searches import make_report

from autotune.output.panels import panels, png_report, poster, time_bars, wrapped
from autotune.output.svg import text_width
from autotune.values.time_spent import Spent


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return make_report(tmp_path_factory.mktemp("search") / "run")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_chart_is_in_the_picture_and_no_colour_is_open(report, theme):
    drawn = poster(report, theme)
    words = [e.text for e in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    for panel in panels(report):
        assert panel.title in words
        assert {key.words for key in panel.legend} <= set(words)
    assert "var(--" not in drawn


def test_the_picture_holds_all_that_is_placed(report):
    drawn = poster(report)
    root = ET.fromstring(drawn)
    height = float(root.get("height"))
    places = [(float(x), float(y)) for x, y in re.findall(r"translate\(([\d.]+) ([\d.]+)\)", drawn)]
    assert max(y for _, y in places) < height
    assert max(x for x, _ in places) < float(root.get("width"))


@pytest.mark.parametrize("width", [346.0, 620.0])
def test_a_legend_stands_below_its_chart_with_all_its_words_at_any_width(report, width):
    for panel in panels(report):
        plot, chart = panel.plot(width), panel.draw(width)
        if plot is None:
            assert chart is None
            continue
        texts = [e for e in ET.fromstring(chart.svg()).iter("text") if float(e.get("y")) > plot.height]
        assert " ".join(e.text for e in texts) == " ".join(key.words for key in panel.legend)
        assert all(float(e.get("x")) + text_width(e.text) <= width for e in texts)
        assert all(float(e.get("y")) < chart.height for e in texts)


def test_a_sentence_is_wrapped_to_its_width():
    words = "a sentence of some length that has to be broken somewhere"
    lines = wrapped(words, 120)
    assert " ".join(lines) == words
    assert all(text_width(line) <= 120 for line in lines)
    assert wrapped("unbreakable" * 9, 50) == ["unbreakable" * 9]


def test_a_picture_is_drawn(report):
    pytest.importorskip("vl_convert")
    picture = png_report(report)
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert width == 1986
    assert height > 1500


def test_the_longest_takes_all_of_the_width():
    parts = ("first_steps_s", "warm_up_s", "measured_s", "checks_s", "trials_overhead_s", "lost_s", "own_s")
    nothing = Spent(**dict.fromkeys(parts, 0.0), overhead_per_trial_s=None)
    spent = nothing.model_copy(update={"first_steps_s": 10.0, "measured_s": 30.0, "trials_overhead_s": 5.0})
    chart = ET.fromstring(time_bars(spent, 346.0).svg())
    bars = [e for e in chart.iter() if (e.get("class") or "").startswith("bar")]
    assert [float(b.get("width")) for b in bars] == pytest.approx([342, 114, 57])
    assert time_bars(nothing, 346.0) is None
