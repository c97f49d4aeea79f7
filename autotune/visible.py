"""Text of others as people may see it: what would act instead of being seen is written as its escape. Pure.

Called wherever text leaves: by the terminal, the reports, and the comments of exported files. Names of models, files,
columns and devices may hold anything: a new line would pass for a line of ours, an escape moves the cursor, a mark of
direction turns words round.
"""

from __future__ import annotations


def visible(text: str) -> str:
    r"""Return `text` on one line, characters that can't be printed as Python's escapes.

    >>> print(visible("a\nb \x1b[31mred \u202e"))
    a\nb \x1b[31mred \u202e
    """
    return text if text.isprintable() else "".join(map(escaped, text))


def escaped(character: str) -> str:
    r"""Return a character if it can be printed, otherwise its escape in Python: `\n`, `\x1b`, `\u2028`."""
    return character if character.isprintable() else ascii(character)[1:-1]
