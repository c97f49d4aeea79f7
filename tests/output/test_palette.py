"""Colours that stand out from their background and from each other, whatever one's eyes."""

import itertools
import math

import pytest

from autotune.output.palette import COMPONENTS, PAPER, SERIES, resolved, variables

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
