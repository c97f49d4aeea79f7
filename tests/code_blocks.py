"""The fenced code blocks of the documentation, and what of them can be taken apart: commands, options, messages."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from autotune.cli.main import app

ROOT = Path(__file__).parents[1]

# Whatever a reader may copy from.
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
)

_FENCE = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]+)\")? *\n(.*?)^\1```", re.MULTILINE | re.DOTALL)

# What stands between two commands, and what may stand before one.
_SEPARATORS = {"&&", "||", ";", "|", "&"}
_BEFORE = {"exec", "srun", "nohup", "then", "else", "do"}


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, the file that it would be, and its text."""

    page: str
    line: int
    language: str
    title: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks in these languages, or all."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for fence in _FENCE.finditer(text):
            indent, language, title, body = fence.groups()
            line = text.count("\n", 0, fence.start()) + 1
            lines = (row.removeprefix(indent) for row in body.splitlines())
            found.append(Block(page.relative_to(ROOT).as_posix(), line, language, title or "", "\n".join(lines) + "\n"))
    return [block for block in found if not languages or block.language in languages]


def commands(script: str) -> list[list[str]]:
    """Return the simple commands of a shell script as words; variables and patterns stay as they are written."""
    found: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        reader.whitespace_split = True
        reader.commenters = "#" if not line.startswith("#!") else ""
        words: list[str] = []
        for word in [*reader, ";"]:
            if word in _SEPARATORS:
                found += [words] if words else []
                words = []
            elif words or not (word in _BEFORE or re.fullmatch(r"\w+=.*", word)):
                words.append(word)
    return found


def autotune_calls(script: str) -> list[list[str]]:
    """Return the arguments of each call of `autotune` in a script, behind whatever launcher; not those handed on."""
    calls = [words[words.index("autotune") + 1 :] for words in commands(script) if "autotune" in words]
    return [[word for word in call if not word.startswith("${@")] for call in calls]


def every_command() -> Iterator[tuple[str, list[Any]]]:
    """Yield the words and the parameters of each command of the command line, a group's before those in it."""
    root = typer.main.get_command(app)
    pending = [(root, root.make_context("autotune", [], resilient_parsing=True))]
    while pending:
        group, context = pending.pop()
        for name, command in getattr(group, "commands", {}).items():
            own = command.make_context(name, [], parent=context, resilient_parsing=True)
            yield own.command_path, command.get_params(own)
            pending.append((command, own))
