"""What charts are made of: texts escaped, values round, colours that stand out whatever one's eyes."""

import itertools
import math
import xml.etree.ElementTree as ET

import pytest

from autotune.output.svg import (
    COMPONENTS,
    PAPER,
    SERIES,
    Chart,
    linear,
    logarithmic,
    mark,
    number,
    padded,
    path,
    rectangle,
    resolved,
    shortened,
    tag,
    text,
    text_width,
    ticks,
    variables,
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


# Simulation of the three kinds of dichromacy on linear RGB (Machado, Oliveira and Fernandes 2009, severity 1.0).
DEFICIENCIES = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
THEMES = ("light", "dark")


def linear_rgb(color: str) -> tuple[float, ...]:
    values = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return tuple(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)


def luminance(color: str) -> float:
    return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear_rgb(color), strict=True))


def contrast(a: str, b: str) -> float:
    """Of WCAG 2."""
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def seen(color: str, deficiency: str | None) -> tuple[float, ...]:
    rgb = linear_rgb(color)
    if deficiency is None:
        return rgb
    rows = DEFICIENCIES[deficiency]
    return tuple(min(1.0, max(0.0, sum(w * v for w, v in zip(row, rgb, strict=True)))) for row in rows)


def lab(rgb: tuple[float, ...]) -> tuple[float, float, float]:
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = [sum(w * v for w, v in zip(row, rgb, strict=True)) / n for row, n in zip(matrix, white, strict=True)]
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(a: str, b: str, deficiency: str | None) -> float:
    """CIE 1976: 2 is just to be noticed, 10 at a glance."""
    return math.dist(lab(seen(a, deficiency)), lab(seen(b, deficiency)))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(("words", "least"), [("ink", 7.0), ("muted", 4.5)])
@pytest.mark.parametrize("surface", ["page", "card"])
def test_texts_can_be_read(theme, words, least, surface):
    assert contrast(getattr(PAPER[words], theme), getattr(PAPER[surface], theme)) >= least


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", SERIES)
def test_marks_stand_out_from_the_card(theme, name):
    assert contrast(getattr(SERIES[name], theme), getattr(PAPER["card"], theme)) >= 3.0


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("deficiency", [None, *DEFICIENCIES])
def test_marks_of_one_chart_differ_for_every_eye(theme, deficiency):
    colors = [getattr(SERIES[name], theme) for name in ("best", "front", "failed", "budget")]
    assert min(difference(a, b, deficiency) for a, b in itertools.combinations(colors, 2)) > 10


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("deficiency", [None, *DEFICIENCIES])
def test_neighbours_of_the_stack_differ_for_every_eye(theme, deficiency):
    colors = [getattr(shade, theme) for shade in COMPONENTS.values()]
    assert min(difference(a, b, deficiency) for a, b in itertools.pairwise(colors)) > 10


def test_every_variable_is_declared_and_can_be_resolved():
    style = "".join(f"var(--{name}) " for name in (*PAPER, *SERIES)) + "var(--part-weights)"
    assert "var(" not in resolved(style, "dark")
    for name in (*PAPER, *SERIES):
        assert f"--{name}: " in variables("light")
