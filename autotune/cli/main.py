"""The commands of `autotune`, and its options `--version` and `--help`.

Heavy modules are imported by the commands that need them, so that ``--help`` is quick.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from autotune.cli import export, history, listings, options, reports, search
from autotune.cli.console import told_errors

app = typer.Typer(
    name="autotune",
    help="Find the fastest training configuration that fits the memory of a GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 found, 1 a bug, 2 bad input, 3 the machine lacks something, 4 infrastructure failed, "
    "5 nothing fits, 130 interrupted.",
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions of autotune and libraries.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """Handle the options before a command."""
    if version:
        with told_errors(as_json=as_json, debug=False):
            listings.show_versions(as_json=as_json)
        raise typer.Exit
    if as_json:
        context.fail("--json before a command goes with --version alone; it belongs behind the command")
    if context.invoked_subcommand is None:
        context.fail("Missing command.")


app.command(cls=options.taking(options.of_search, of_project=True))(search.find)
app.command()(search.resume)
app.command(cls=options.taking(options.of_estimate))(search.estimate)
for _command in (listings.models, listings.gpus, listings.spaces, listings.doctor):
    app.command()(_command)
app.command(cls=options.taking(options.of_script, of_project=True), context_settings=search.SETTINGS)(search.script)
for _command in (reports.report, reports.explain, export.export, reports.dashboard, options.completion):
    app.command()(_command)
app.add_typer(history.history, name="history")


def main() -> None:
    """Run the command line; usage errors end with typer's exit code 2."""
    app(obj=time.perf_counter())  # commands find the time of their start in `typer.Context.obj`
