"""`autotune history`: lists and deletes the searches in the lasting record (see `autotune.storage.record`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.console import Json, guarded, print_json, print_text, stdout
from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.storage.record import Record
    from autotune.storage.recorded import RecordedSearch

history = typer.Typer(help="What earlier searches measured: list, forget.", rich_markup_mode=None)


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
    found = groups(_of_model(database.searches(), model))
    if as_json:
        print_json([group.model_dump(mode="json") for group in found])
    elif quiet:
        for group in found:
            print_text(group.key)
    else:
        stdout().print(history_table(found, database.where), highlight=False)


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
    found = _with_key(database, key) if key is not None else database.searches()
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
    from autotune.storage.record import VARIABLE, record

    found = record()
    if found is None:
        raise InputError(f"{VARIABLE} is off: there is no record")
    return found


def _with_key(database: Record, key: str) -> list[RecordedSearch]:
    """Return the searches of the one key that begins with `key`.

    Raises:
        InputError: No key or more than one begins so.
    """
    searches = database.searches()
    found = sorted({s.key.short for s in searches if s.key.short.startswith(key.lower())})
    if not key or not found:
        raise InputError(f"history {key}: nothing is recorded under this key; `autotune history` lists them")
    if len(found) > 1:
        raise InputError(f"history {key}: could be {', '.join(found)}; write more of it")
    return [search for search in searches if search.key.short == found[0]]


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


def _counted(searches: list[RecordedSearch]) -> str:
    trials = sum(len(search.trials) for search in searches)
    return f"{len(searches)} search{'es' if len(searches) != 1 else ''}, {trials} trials"
