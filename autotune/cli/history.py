"""`autotune history`: lists, shows, exports, completes and deletes the trials in the lasting record.

Without a sub-command, the searches are listed. `autotune.storage.record` describes the record.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.console import Json, guarded, print_json, print_text, stdout, writing
from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.storage.record import Record
    from autotune.storage.recorded import RecordedSearch
    from autotune.storage.sync import CaughtUp

history = typer.Typer(help="What earlier searches measured: list, show, export, sync, forget.", rich_markup_mode=None)


@history.callback(invoke_without_command=True)
@guarded
def listed(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Only searches of models whose name contains this.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the keys alone, one a line.")] = False,
    as_json: Json = False,
) -> None:
    """List what earlier searches measured, by model, workload, device and versions."""
    if context.invoked_subcommand is not None:
        return

    from autotune.output.listings import groups, history_table

    database = _database()
    found = groups(_of_model(database.searches(brief=True), model))
    if as_json:
        print_json([group.model_dump(mode="json") for group in found])
    elif quiet:
        for group in found:
            print_text(group.key)
    else:
        stdout().print(history_table(found, database.where), highlight=False)


@history.command("show")
@guarded
def shown(
    key: Annotated[str, typer.Argument(help="A key of the list, or its beginning.")], as_json: Json = False
) -> None:
    """Show every trial of the searches with a key."""
    found = _with_key(_database(), key)
    if as_json:
        print_json(_document(found))
        return
    from autotune.output.listings import trials_table

    stdout().print(trials_table(found), highlight=False)


@history.command()
@guarded
def export(
    file: Annotated[Path | None, typer.Argument(help="Write here; otherwise to stdout.")] = None, as_json: Json = False
) -> None:
    """Write all that is recorded, every measurement included, as JSON."""
    found = _database().searches()
    if file is None:
        print_json(_document(found))
        return
    from autotune.value import save_text

    with writing(str(file)):
        save_text(json.dumps(_document(found), indent=2) + "\n", file)
    trials = sum(len(search.trials) for search in found)
    if as_json:
        print_json({"file": str(file), "searches": len(found), "trials": trials})
    else:
        stdout().print(f"{file}: {_counted(found)}", highlight=False)


@history.command()
@guarded
def sync(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories of searches.")],
    as_json: Json = False,
) -> None:
    """Add the trials of run directories to the record, where they are missing."""
    from autotune.storage.sync import catch_up

    database = _database()
    found = []
    for run_dir in run_dirs:
        caught_up = catch_up(database, run_dir)
        found.append(caught_up)
        if not as_json:
            stdout().print(_caught_up(caught_up), highlight=False)
    if as_json:
        print_json([caught_up.model_dump(mode="json") for caught_up in found])


@history.command()
@guarded
def forget(
    key: Annotated[str | None, typer.Argument(help="A key of the list, or its beginning.")] = None,
    model: Annotated[str | None, typer.Option(help="All searches of the model of this name.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that is recorded.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the recorded searches of a key, of a model, or all; run directories are left alone."""
    if sum((key is not None, model is not None, everything)) != 1:
        raise InputError("name what to forget: a KEY of `autotune history`, --model NAME, or --all")
    database = _database()
    found = _with_key(database, key, brief=True) if key is not None else database.searches(brief=True)
    if model is not None:
        found = _named(found, model)
    if found and not yes:
        _ask(f"forget {_counted(found)}?")
    if found:
        database.forget(found)
    if as_json:
        print_json({"searches": len(found), "trials": sum(len(search.trials) for search in found)})
    else:
        stdout().print(f"forgotten: {_counted(found)}", highlight=False)


def _database() -> Record:
    from autotune.storage.database import VARIABLE
    from autotune.storage.record import record

    found = record()
    if found is None:
        raise InputError(f"{VARIABLE} is off: there is no record")
    return found


def _with_key(database: Record, key: str, *, brief: bool = False) -> list[RecordedSearch]:
    """Return the searches of the one key that begins with `key`.

    Raises:
        InputError: No key or more than one begins so.
    """
    keys = {search.key.short: search.key for search in database.searches(brief=True)}
    found = sorted(short for short in keys if short.startswith(key.lower()))
    if not key or not found:
        raise InputError(f"history {key}: nothing is recorded under this key; `autotune history` lists them")
    if len(found) > 1:
        raise InputError(f"history {key}: could be {', '.join(found)}; write more of it")
    return database.searches(key=keys[found[0]], brief=brief)


def _of_model(searches: list[RecordedSearch], part: str) -> list[RecordedSearch]:
    found = [search for search in searches if part.lower() in search.model.lower()]
    if part and not found:
        raise InputError(f"--model {part}: nothing is recorded of a model with this in its name")
    return found


def _named(searches: list[RecordedSearch], name: str) -> list[RecordedSearch]:
    from autotune.errors import suggestion

    found = [search for search in searches if search.model.lower() == name.lower()]
    if not found:
        near = suggestion(name, {search.model for search in searches})
        raise InputError(f"--model {name}: nothing is recorded of it{near}; `autotune history` lists the names")
    return found


def _ask(question: str) -> None:
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:  # nobody there to answer
        raise InputError(f"{question} nobody answered; --yes doesn't ask") from None
    if not agreed:
        raise typer.Exit(0)


def _caught_up(found: CaughtUp) -> str:
    if not found.wanted:
        return f"{found.run_directory}: left alone, {found.reason}"
    return f"{found.run_directory}: {found.written} of its {found.trials} trials written, the others were there"


def _counted(searches: list[RecordedSearch]) -> str:
    trials = sum(len(search.trials) for search in searches)
    return f"{len(searches)} search{'es' if len(searches) != 1 else ''}, {trials} trials"


def _document(searches: list[RecordedSearch]) -> dict[str, Any]:
    from autotune.storage.record import SCHEMA_VERSION

    written = [{"short_key": search.key.short, **search.model_dump(mode="json")} for search in searches]
    return {"schema_version": SCHEMA_VERSION, "searches": written}
