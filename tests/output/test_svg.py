"""The pieces of charts: escaped, round, within their range."""

import math
import xml.etree.ElementTree as ET

import pytest

from autotune.output.svg import (
    Chart,
    linear,
    logarithmic,
    mark,
    number,
    padded,
    path,
    rectangle,
    shortened,
    tag,
    text,
    text_width,
    ticks,
)


def test_texts_and_attributes_are_escaped():
    drawn = text(0, 0, "<b>&") + tag("rect", data_tip='"><script>')
    root = ET.fromstring(f"<svg>{drawn}</svg>")
    assert root[0].text == "<b>&"
    assert root[1].get("data-tip") == '"><script>'


def test_attributes_without_a_value_are_left_out():
    assert tag("g", class_=None, data_tip=None, stroke_width=2) == '<g stroke-width="2"/>'


def test_a_text_that_is_cut_keeps_its_whole_in_the_title():
    drawn = ET.fromstring(text(0, 0, "a rather long text", limit=60))
    assert drawn[0].text == "a rather long text"
    assert drawn[0].tail == shortened("a rather long text", 60)


@pytest.mark.parametrize("limit", [20, 60, 100])
def test_a_text_is_cut_to_its_width(limit):
    cut = shortened("precision fp32 to bf16", limit)
    assert text_width(cut) <= limit
    assert cut.endswith("…")
    assert shortened("bf16", 100) == "bf16"


@pytest.mark.parametrize(
    ("low", "high", "most", "found"),
    [
        (0, 10, 6, [0, 2, 4, 6, 8, 10]),
        (0, 1, 3, [0, 0.5, 1]),
        (93, 118, 6, [95, 100, 105, 110, 115]),
        (0.0012, 0.0051, 5, [0.002, 0.003, 0.004, 0.005]),
        (5, 5, 4, [5]),
    ],
)
def test_ticks_are_round_and_few(low, high, most, found):
    assert ticks(low, high, most) == pytest.approx(found)


@pytest.mark.parametrize("scale", [linear, logarithmic])
def test_scales_map_ends_to_ends(scale):
    position = scale(2.0, 8.0, 100.0, 0.0)
    assert (position(2.0), position(8.0)) == (100.0, 0.0)
    assert position(4.0) == pytest.approx(50.0 if scale is logarithmic else 200 / 3)


def test_a_range_of_one_value_has_room():
    low, high = padded([5.0])
    assert low < 5.0 < high
    assert padded([0.0, 1.0])[0] == 0.0  # memory and rates don't go below


@pytest.mark.parametrize("shape", ["circle", "square", "diamond", "star", "cross", "triangle"])
def test_every_shape_is_drawn_around_its_place(shape):
    drawn = ET.fromstring(mark(shape, 50, 40, "best", "a tip"))
    assert drawn.get("data-tip") == "a tip"
    if shape != "circle":
        corner = drawn.get("d")[1:].split(" ")
        assert math.dist((float(corner[0]), float(corner[1])), (50, 40)) < 12


def test_shapes_are_all_different():
    drawn = {mark(shape, 0, 0, "k") for shape in ("circle", "square", "diamond", "star", "cross", "triangle")}
    assert len(drawn) == 6


def test_what_is_tiny_is_still_seen():
    assert ET.fromstring(rectangle(0, 0, 0.001, 5, "bar")).get("width") == "1"


def test_a_chart_is_a_labelled_picture():
    drawn = ET.fromstring(Chart(path([(0, 0), (1, 1)], "line"), 100, 50, "what it shows").svg("wide"))
    assert drawn.attrib == {"viewBox": "0 0 100 50", "role": "img", "aria-label": "what it shows", "class": "wide"}


def test_numbers_are_as_short_as_they_may_be():
    assert [number(v) for v in (0.5, 2.0, 12345.0, 0.00125)] == ["0.5", "2", "12,345", "0.00125"]
