"""Colours of the report, for light and dark, by what they stand for.

Series are Okabe and Ito's (Color Universal Design, https://jfly.uni-koeln.de/color/), told apart with any of the common
kinds of colour blindness; each also has a shape or a label of its own. Some are shifted towards the background's
opposite, so that a mark stands out from it by 3 to 1 and text by 4.5 to 1 (WCAG 2.2, 1.4.11 and 1.4.3).
"""

from __future__ import annotations

from typing import NamedTuple


class Shade(NamedTuple):
    """One colour in both themes."""

    light: str
    dark: str


# Surfaces and texts.
PAPER = {
    "page": Shade("#f4f5f7", "#101317"),
    "card": Shade("#ffffff", "#191d23"),
    "line": Shade("#d5d9df", "#343b45"),
    "grid": Shade("#e7e9ed", "#2a3038"),
    "ink": Shade("#16191d", "#eceff3"),
    "muted": Shade("#565e69", "#a3adb9"),
}

# Marks and lines that stand on a card.
SERIES = {
    "baseline": Shade("#6b7280", "#9aa4b1"),
    "best": Shade("#0072b2", "#56b4e9"),
    "front": Shade("#007f5c", "#17a67d"),
    "trial": Shade("#7d8590", "#8a94a1"),
    "failed": Shade("#d55e00", "#f0803c"),
    "budget": Shade("#a8327d", "#e58fc4"),
    "gain": Shade("#0072b2", "#56b4e9"),
    "loss": Shade("#d55e00", "#f0803c"),
}

# Components of memory, in the order of the stack; neighbours differ in lightness, and each is outlined and named.
COMPONENTS = {
    "weights": Shade("#0072b2", "#0072b2"),
    "gradients": Shade("#56b4e9", "#56b4e9"),
    "optimizer": Shade("#e69f00", "#e69f00"),
    "activations": Shade("#009e73", "#009e73"),
    "temporaries": Shade("#cc79a7", "#cc79a7"),
    "communication": Shade("#f0e442", "#f0e442"),
    "beyond": Shade("#8c8c8c", "#8c8c8c"),
}


def variables(theme: str) -> str:
    """Return the declarations of CSS variables for 'light' or 'dark'."""
    everything = {**PAPER, **SERIES, **{f"part-{name}": shade for name, shade in COMPONENTS.items()}}
    return " ".join(f"--{name}: {getattr(shade, theme)};" for name, shade in everything.items())


def resolved(style: str, theme: str) -> str:
    """Return `style` with its variables replaced by their values, for who knows no variables."""
    everything = {**PAPER, **SERIES, **{f"part-{name}": shade for name, shade in COMPONENTS.items()}}
    for name, shade in everything.items():
        style = style.replace(f"var(--{name})", getattr(shade, theme))
    return style
