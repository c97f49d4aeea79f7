"""Options that the commands which search have in common, as types of their arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune import completing

Allow = Annotated[
    str, typer.Option(help="What may change: exact, numerics, optimizer, method.", autocompletion=completing.ALLOWANCES)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", autocompletion=completing.DEVICES)]
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
