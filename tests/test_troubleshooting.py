"""The messages that the page on troubleshooting quotes are those of the code."""

import ast
import functools
import re

from code_blocks import ROOT

ANY = "…"
QUOTED = re.compile(r"^### (`+) ?(.+?) ?\1$", re.MULTILINE)
MESSAGES = [quoted[2] for quoted in QUOTED.finditer((ROOT / "docs" / "troubleshooting.md").read_text())]


def text_of(node: ast.expr) -> str:
    """Return what a string or an f-string says, with a mark for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value).replace("{}", ANY)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return ANY


@functools.cache
def said() -> str:
    """Return all that the code can say, a line each."""
    texts = [
        text_of(node)
        for path in sorted((ROOT / "autotune").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]
    return "\n".join(" ".join(text.split()) for text in texts)


def is_said(message: str) -> bool:
    return re.search(".*".join(map(re.escape, message.split(ANY))), said()) is not None


def test_every_quoted_message_is_one_of_the_code_and_another_would_be_noticed():
    assert [message for message in MESSAGES if not is_said(message)] == []
    assert len(MESSAGES) > 20
    assert not is_said("nothing fits …: the closest, …, still burned down")
