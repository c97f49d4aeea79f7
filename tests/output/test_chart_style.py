"""How charts are drawn: as SVG in the theme of its page, with texts that stay texts, in colours for every eye."""

import itertools
import math
import re
import warnings
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest

from autotune.output.chart_style import (
    PAPER,
    SERIES,
    limited,
    mark,
    padded,
    styled,
    svg,
    trial_axes,
    variables,
    with_legend,
)

EVIL = '</text><script>"&$x^2$ \u202e'


def drawn(width: float, words: str = "a mark", tip: str = "a tip"):
    figure, axes = trial_axes(width, words, words, words)
    mark(axes, "winner", 0.5, 0.5, tip, words)
    return with_legend(figure, width)


def test_a_chart_is_a_labelled_picture():
    found = ET.fromstring(svg(drawn, 300, "chart", "wide"))
    assert found.get("role") == "img"
    assert found.get("aria-label") == "a mark"
    assert found.get("class") == "wide"
    assert re.fullmatch(r"0 0 300 \d+(\.\d+)?", found.get("viewBox"))


def test_texts_and_tips_stay_texts():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = svg(lambda width: drawn(width, EVIL, f"{EVIL}\nsecond"), 300, "chart")
        assert "\u6a21\u578b" in svg(lambda width: drawn(width, "\u6a21\u578b"), 300, "chart")  # the font lacks them
    found = ET.fromstring(text)
    shown = EVIL.replace("\u202e", "\\u202e")
    assert found.get("aria-label") == shown
    assert EVIL in [e.text for e in found.iter("text")]
    (marked,) = [e for e in found.iter("g") if e.get("data-tip")]
    assert marked.get("data-tip") == f"{shown} second"  # in XML; in HTML the line stays broken
    assert "\nsecond" in text
    assert not list(found.iter("script"))


def test_the_same_chart_is_the_same_text_and_no_id_is_of_two_charts():
    found = [svg(drawn, width, name) for width, name in ((300, "a"), (300, "b"), (400, "a"))]
    assert found[0] == svg(drawn, 300, "a")
    ids = [found_id for each in found for found_id in re.findall(r' id="([^"]*)"', each)]
    assert len(ids) == len(set(ids)) > 0


def test_every_colour_is_a_variable_of_the_page():
    found = svg(drawn, 300, "chart")
    used = set(re.findall(r"var\(--([a-z-]+)\)", found))
    assert {"best", "card", "ink", "muted", "grid"} <= used
    assert not re.search(r"#[0-9a-f]{6}", found)
    for theme in ("light", "dark"):
        for name in used:
            assert f"--{name}: #" in variables(theme)


def test_settings_of_matplotlib_are_neither_used_nor_changed():
    with mpl.rc_context({"font.size": 40, "axes.grid": False, "svg.fonttype": "path"}):
        mine = dict(mpl.rcParams)
        assert svg(drawn, 300, "chart") == svg(drawn, 300, "chart")
        assert dict(mpl.rcParams) == mine
        odd = svg(drawn, 300, "chart")
    assert odd == svg(drawn, 300, "chart")


def test_a_range_of_one_value_has_room():
    low, high = padded([5.0], 0.1)
    assert low < 5.0 < high
    assert padded([0.0, 1.0], 0.1)[0] == 0.0  # memory and rates don't go below


@pytest.mark.parametrize(
    ("low", "high", "logs", "found"),
    [(0, 10, False, [0, 2, 4, 6, 8, 10]), (93, 118, False, [95, 100, 105, 110, 115]), (0.9, 110, True, [1, 10, 100])],
)
def test_ticks_are_round_and_few(low, high, logs, found):
    with styled():
        _, axes = trial_axes(346, "", "", "")
        limited(axes, "y", low, high, 346, logs=logs)
        shown = [at for at in axes.get_yticks() if low <= at <= high]
    assert set(found) <= set(shown)
    assert len(shown) <= 7


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
def test_texts_can_be_read_and_marks_stand_out_from_the_card(theme):
    for words, least in (("ink", 7.0), ("muted", 4.5)):
        for surface in ("page", "card"):
            assert contrast(getattr(PAPER[words], theme), getattr(PAPER[surface], theme)) >= least
    for name, shade in SERIES.items():
        assert contrast(getattr(shade, theme), getattr(PAPER["card"], theme)) >= 3.0, name


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("deficiency", [None, *DEFICIENCIES])
def test_marks_of_one_chart_differ_for_every_eye(theme, deficiency):
    colors = [getattr(SERIES[name], theme) for name in ("best", "front", "failed", "budget")]
    assert min(difference(a, b, deficiency) for a, b in itertools.combinations(colors, 2)) > 10
