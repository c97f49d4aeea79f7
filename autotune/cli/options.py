"""Options of `find`, `script` and `estimate`, made from fields when the command is used.

They are not made earlier, as the fields (`autotune.planning.options`) are slow to import and ``autotune --help`` does
not need them. Values are passed on as text, which the fields parse and check.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
import typer.core

from autotune.cli.console import told_errors

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from autotune.values.problem import Observer

PROGRAM = "autotune"
_VARIABLE = "_AUTOTUNE_COMPLETE"  # environment variable by which a shell asks for completions

# Keys in `typer.Context.meta`: values of options, and a project's file with its defaults.
_GIVEN, _PROJECT = "autotune.options", "autotune.project"


class Shell(StrEnum):
    """A shell for which `autotune completion` prints a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    context: typer.Context, shell: Annotated[Shell, typer.Argument(help="Add it to the shell's start-up file.")]
) -> None:
    """Print a script that completes commands and options in a shell: eval "$(autotune completion bash)"."""
    from typer.completion import shell_complete

    code = shell_complete(context.find_root().command, {}, PROGRAM, _VARIABLE, f"source_{shell}")
    raise typer.Exit(code)


TrustRunDir = Annotated[
    bool, typer.Option("--trust-run-dir", help="Run its code, though it was not begun by you on this machine.")
]


def given(context: typer.Context) -> dict[str, Any]:
    """Return the values of the given options, by the names of `autotune.planning.options`."""
    return dict(context.meta.get(_GIVEN, {}))


def note_project(context: typer.Context, observer: Observer) -> None:
    """Say which file of a project gave defaults, and for which options, if one did."""
    from autotune.values.problem import Note

    path, values = context.meta.get(_PROJECT, ("", {}))
    taken = [n for n in values if getattr(context.get_parameter_source(n), "name", "") == "DEFAULT_MAP"]
    if taken:
        observer(Note(text=f"from {path}: {', '.join('--' + name.replace('_', '-') for name in taken)}"))


@functools.cache
def _made(module: str, name: str, *, of_script: bool) -> tuple[Any, ...]:
    """Return typer's options for the fields of a class, of which a script decides some, made from a signature."""
    from autotune.planning.options import fields_by_name

    decided: Collection[str] = ()
    if of_script:
        from autotune.planning.user_trainer import DECIDED_BY_CODE as decided

    def carrier(**values: Any) -> None:
        """Carry the options to typer; never called."""

    fields = fields_by_name(getattr(importlib.import_module(module), name)).items()
    listed = [_option(name, field) for name, field in fields if name not in decided]
    carrier.__annotations__ = {parameter.name: parameter.annotation for parameter in listed}
    carrier.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(carrier)
    return tuple(typer.main.get_command(app).params)


def taking(
    module: str, name: str, *, of_project: bool = False, of_script: bool = False
) -> type[typer.core.TyperCommand]:
    """Return a class of commands with options for the fields of a class, followed by their own.

    With `of_project`, `[tool.autotune]` of a project's pyproject.toml has defaults for them. With `of_script`, those
    that a user's script decides are left out.
    """

    class Command(typer.core.TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if of_project and not ctx.resilient_parsing and "--help" not in args:
                with told_errors(as_json="--json" in args, debug="--debug" in args):
                    from autotune.planning.options import project_defaults

                    found = project_defaults(Path.cwd())
                    if found is not None:  # click takes them where an option isn't given
                        ctx.meta[_PROJECT], ctx.default_map = found, found[1]
            return super().parse_args(ctx, args)

        def get_params(self, ctx: Any) -> list[Any]:
            return [*_made(module, name, of_script=of_script), *super().get_params(ctx)]

        def format_options(self, ctx: Any, formatter: Any) -> None:
            """Write the help of arguments and options, by group; those of the command alone are about its output."""
            from autotune.planning.options import GROUPS

            groups: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *GROUPS)}
            for parameter in self.get_params(ctx):
                usual = "Arguments" if parameter.param_type_name == "argument" else GROUPS[-1]
                if (record := parameter.get_help_record(ctx)) is not None:
                    groups[getattr(parameter, "rich_help_panel", None) or usual].append(record)
            for name, records in groups.items():
                if records:
                    with formatter.section(name):
                        formatter.write_dl(records)

    return Command


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return an option as a parameter of a signature that typer reads."""
    from pydantic import NonNegativeInt, PositiveInt

    is_flag, word = field.annotation is bool, name.replace("_", "-")
    is_list = field.default == ()  # such an option may be repeated
    is_whole = bool({int, PositiveInt, NonNegativeInt} & {field.annotation, *get_args(field.annotation)})
    extra: Any = field.json_schema_extra
    option = typer.Option(
        f"--{word}/--no-{word}" if field.default is True else f"--{word}",
        *(("-o",) if name == "output" else ()),
        help=field.description,
        metavar="<int>" if is_whole else "<str>,..." if is_list else None,
        rich_help_panel=extra["group"],
        callback=_keep,
        expose_value=False,
    )
    default: Any = None if field.default in (None, ()) else str(field.default)
    if is_flag:
        default = None if field.default else False
    elif field.is_required():
        default = inspect.Parameter.empty
    kind: Any = bool if is_flag else list[str] if is_list else str
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _keep(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> None:
    """Store the value of an option in the context, if it was given."""
    if value not in (None, [], ()):
        context.meta.setdefault(_GIVEN, {})[str(parameter.name)] = value
