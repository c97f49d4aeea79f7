"""The reference, made from the code when the site is built: commands and options, the Python API, exit codes, modules.

A command, an option or a public name that is added to the code is on the site without anything being written here.
"""

from __future__ import annotations

import ast
import html
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import autotune
from autotune import errors
from autotune.cli.main import app

_EXIT_MEANINGS = {
    0: "found (also: time up with an answer, no clear winner)",
    errors.EXIT_BUG: "a bug of ours",
    2: "bad input",
    3: "the machine lacks something that was asked for",
    4: "infrastructure failed: trial processes can't be run, or the device failed",
    5: "nothing fits, or the configuration to estimate doesn't, with the closest miss and what would make it fit",
    6: "nothing passed: what trained failed when it was measured again or checked, with the causes",
    errors.EXIT_INTERRUPTED: "interrupted; the best so far is written",
}

_ROLE = re.compile(r":(?:class|data|func|meth|mod):(?=<code>)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the generated pages."""
    pages = {
        "commands.md": commands_page(),
        "api.md": api_page(),
        "exit-codes.md": exit_codes_page(),
        "modules.md": modules_page(),
    }
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Leave out the roles of reStructuredText that docstrings have."""
    return _ROLE.sub("", content)


def commands_page() -> str:
    """Return a section for each command, with every argument and option as its `--help` has it."""
    import typer

    root = typer.main.get_command(app)
    context = root.make_context("autotune", [], resilient_parsing=True)
    head = ["# Commands", _text(root.help), _text(root.epilog), "See also [exit codes](exit-codes.md)."]
    return "\n\n".join([*head, *_sections(root, context, level=2)]) + "\n"


def _sections(group: Any, context: Any, level: int) -> Iterator[str]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        own = command.make_context(name, [], parent=context, resilient_parsing=True)
        usage = " ".join([own.command_path, *command.collect_usage_pieces(own)])
        yield f"{'#' * level} {own.command_path}"
        yield _text(command.help)
        yield f"```text\n{usage}\n```"
        yield _table(command, own)
        if hasattr(command, "commands"):
            yield from _sections(command, own, level + 1)


def _table(command: Any, context: Any) -> str:
    records = (parameter.get_help_record(context) for parameter in command.get_params(context))
    rows = [f"| <code>{_cell(words)}</code> | {_cell(meaning)} |" for words, meaning in filter(None, records)]
    return "\n".join(["| argument or option | meaning |", "| --- | --- |", *rows])


def _text(text: str | None) -> str:
    return html.escape(inspect.cleandoc(text or ""), quote=False)


def _cell(text: str) -> str:
    return _text(text).replace("|", "&#124;").replace("\n", " ").replace("*", "&#42;")


def api_page() -> str:
    """Return the public names of the package, functions first, in the order of their modules."""
    names = sorted(autotune.__all__, key=list(autotune._HOMES).index)
    functions = [name for name in names if name[0].islower()]
    types = [name for name in names if not name[0].islower()]
    head = (
        "# Python\n\n`import autotune` is quick: torch and transformers are loaded when they are first needed. What a "
        "command does is what the function of its name does; errors are those of [exit codes](exit-codes.md)."
    )
    sections = (head, "## Functions", *map(_directive, functions), "## Values", *map(_directive, types))
    return "\n\n".join(sections) + "\n"


def _directive(name: str) -> str:
    return f"::: autotune.{name}"


def exit_codes_page() -> str:
    """Return what each exit code means, and the errors that end with it."""
    rows = [f"| {code} | {meaning} | {_of_code(code)} |" for code, meaning in _EXIT_MEANINGS.items()]
    return "\n".join(
        [
            "# Exit codes",
            "",
            "An error is one line on stderr, with `--json` an object on stdout as well; `--debug` shows the traceback.",
            "",
            "| code | meaning | from Python |",
            "| --- | --- | --- |",
            *rows,
            "",
            "From Python these are exceptions of `autotune.errors`, all of them `autotune.AutotuneError`:",
            "",
            *(f"* `{found.__name__}`: {_text(found.__doc__).splitlines()[0]}" for found in _classes()),
            "",
            "A trial that fails is never an error: running out of memory, time or patience is a result.",
            "",
        ]
    )


def _classes() -> list[type[errors.AutotuneError]]:
    found = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.AutotuneError)]
    return [c for c in found if c is not errors.AutotuneError]


def _of_code(code: int) -> str:
    if code == errors.EXIT_INTERRUPTED:
        return "`KeyboardInterrupt`, `autotune.search.tuner.SearchInterrupted`"
    return ", ".join(f"`{c.__name__}`" for c in _classes() if c.exit_code == code)


def modules_page() -> str:
    """Return a line for each module, by package: what it says of itself first."""
    lines = ["# Modules", "", "What each module says of itself first; how they fit together is [the code](code.md)."]
    package = Path(autotune.__file__).parent
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        lines += ["", f"## {folder.relative_to(package.parent).as_posix()}/", ""]
        lines += [f"* `{path.name}`: {_first_sentence(path)}" for path in sorted(folder.glob("*.py"))]
    return "\n".join(lines) + "\n"


def _first_sentence(path: Path) -> str:
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return _text(" ".join(paragraph.split())).replace("*", "&#42;")
