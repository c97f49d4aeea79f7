"""The commands of `autotune`, and its options `--version` and `--help`.

Heavy modules are imported by the commands that need them, so that ``--help`` is quick.
"""

import importlib
import itertools
import os
import sys
import time
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from autotune.cli import reports, search
from autotune.cli.console import reporting_errors, taking
from autotune.errors import InputError
from autotune.version import __version__

_USAGE_ERROR: Any = typer.BadParameter.__base__  # typer exports kinds of it alone


class _Commands(TyperGroup):
    """All commands; an error in the usage of one, or before it begins, is told in one line, like any other."""

    def main(self, *arguments: Any, **extra: Any) -> Any:
        given = (extra.get("args") or sys.argv[1:])[1:]  # behind the command, up to a script's own
        asked = set(itertools.takewhile(lambda word: word != "--", given))
        self.telling = {"as_json": "--json" in asked, "debug": "--debug" in asked}
        try:
            with reporting_errors(**self.telling):
                if asked:  # typer would import it, which takes long, and end at a Ctrl-C without a word
                    importlib.import_module("pydantic")
                try:
                    found = super().main(*arguments, **{**extra, "standalone_mode": False})
                except _USAGE_ERROR as error:
                    if error.ctx is not None and error.message == error.ctx.get_help():  # nothing was asked for
                        error.show()
                        raise typer.Exit(error.exit_code) from None
                    words = " ".join(error.format_message().split()).rstrip(".")
                    help_of = getattr(error.ctx, "command_path", "autotune")
                    raise InputError(f"{words} (`{help_of} --help` lists what there is)") from None
        except typer.Exit as ended:
            found = ended.exit_code
        if callable(found):
            found = found()  # the user's own training, whose errors and exit code are its own
        sys.exit(found if isinstance(found, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # while options are made; a command tells of its own
            with reporting_errors(**self.telling):
                raise


app = typer.Typer(
    name="autotune", cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Find the fastest training configuration that fits the memory of a GPU.",
    epilog="Exit codes: 0 found, 1 a bug, 2 bad input, 3 the machine lacks something, 4 infrastructure failed, "
    "5 nothing fits, 6 nothing passed, 130 interrupted.",
)  # fmt: skip


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version; `autotune doctor` has more.")] = False,
) -> None:
    """Handle the options before a command."""
    if version:
        print(f"autotune {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail("Missing command.")


app.command(cls=taking("SearchOptions"))(search.find)
app.command()(search.resume)
app.command(cls=taking("EstimateOptions"))(search.estimate)
for _command in (reports.models, reports.gpus, reports.spaces, reports.doctor):
    app.command()(_command)
app.command(
    cls=taking("SearchOptions", of_script=True),
    context_settings={"allow_interspersed_args": False},  # words after the first are of the script's command line
)(search.script)
for _command in (reports.report, reports.explain, reports.compare, reports.export):
    app.command()(_command)
app.add_typer(reports.history, name="history")


def main() -> None:
    """Run the command line; a standard stream that is closed leads nowhere, as files would take its number."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    app(obj=time.perf_counter())  # commands find the time of their start in `typer.Context.obj`
