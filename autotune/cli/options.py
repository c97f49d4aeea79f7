"""Options that several commands have, as types of their arguments; `autotune completion`.

Nothing is imported until a shell asks, which it does by running `autotune` with a variable set, as typer has it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

PROGRAM = "autotune"
_VARIABLE = "_AUTOTUNE_COMPLETE"


class Shell(StrEnum):
    """Whose completion is tested."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    context: typer.Context, shell: Annotated[Shell, typer.Argument(help="Add it to the shell's start-up file.")]
) -> None:
    """Print what makes a shell complete autotune's commands and options: eval "$(autotune completion bash)"."""
    from typer.completion import shell_complete

    code = shell_complete(context.find_root().command, {}, PROGRAM, _VARIABLE, f"source_{shell}")
    raise typer.Exit(code)


def among(*words: str) -> Callable[[str], list[str]]:
    """Return what completes to one of `words`."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def models(incomplete: str) -> list[str]:
    """Return the catalogue's names that begin so; where there is none, the shell offers files."""
    from autotune.values.catalogue import entries_by_name

    return sorted(name for name in entries_by_name() if name.startswith(incomplete.lower()))


def gpus(incomplete: str) -> list[str]:
    """Return the GPUs of the table whose names begin so, and 'all'."""
    from autotune.values.catalogue.gpus import gpus as table

    return [name for name in (*(gpu.name for gpu in table()), "all") if name.startswith(incomplete)]


def spaces(incomplete: str) -> list[str]:
    """Return the built-in search spaces whose names begin so."""
    from autotune.space.file import builtin_spaces

    return [name for name in builtin_spaces() if name.startswith(incomplete)]


def tasks(incomplete: str) -> list[str]:
    """Return the tasks whose names begin so."""
    from autotune.values.model import Task

    return [task for task in Task if task.startswith(incomplete)]


EFFORTS = among("quick", "standard", "thorough")
ALLOWANCES = among("exact", "numerics", "optimizer", "method")
DEVICES = among("auto", "cpu", "cuda")

Allow = Annotated[
    str, typer.Option(help="What may change: exact, numerics, optimizer, method.", autocompletion=ALLOWANCES)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", autocompletion=DEVICES)]
Memory = Annotated[str | None, typer.Option(help="Device memory to stay within, such as 24GiB.")]
MaxTrials = Annotated[int | None, typer.Option(min=1, help="Trials of the search.")]
MaxTime = Annotated[str | None, typer.Option(help="Time of the whole search, such as 10m.")]
Exhaustive = Annotated[bool, typer.Option("--exhaustive", help="Measure every point; write table.jsonl.")]
Repeat = Annotated[int, typer.Option(min=1, help="Times each point is measured (--exhaustive).")]
TrainSteps = Annotated[int | None, typer.Option(min=1, help="Minimise the time of a run of so many steps.")]
TrainTokens = Annotated[str | None, typer.Option(help="The same in tokens, such as 20B.")]
CheckLoss = Annotated[int | None, typer.Option(min=0, help="Steps whose losses must agree [20; quick 0].")]
TrustRunDir = Annotated[
    bool, typer.Option("--trust-run-dir", help="Run its code, though it was not begun by you on this machine.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the answer here too.")]


Model = Annotated[
    str, typer.Option(help="Catalogue name, directory with config.json, or hub id.", autocompletion=models)
]
Task = Annotated[
    str | None, typer.Option(help="Head to train; by default the architecture's usual one.", autocompletion=tasks)
]
Space = Annotated[str | None, typer.Option(help="Built-in search space or YAML file.", autocompletion=spaces)]
Gpu = Annotated[
    str | None, typer.Option(help="Device of `autotune gpus`, or all [this machine's].", autocompletion=gpus)
]
Effort = Annotated[str, typer.Option(help="How long to search: quick, standard, thorough.", autocompletion=EFFORTS)]
Engine = Annotated[
    str, typer.Option(help="What runs trials: local, or ray for a cluster.", autocompletion=among("local", "ray"))
]
