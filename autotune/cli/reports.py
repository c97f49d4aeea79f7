"""`autotune report` and `autotune explain`: what a search found, and what each knob of its winner brought."""

from __future__ import annotations

import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.console import Debug, Json, Quiet, Verbose, guarded, print_json, print_text, stderr, stdout
from autotune.cli.options import TrustRunDir
from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.output.run_report import RunReport


class Format(StrEnum):
    """Of a report."""

    HTML = "html"
    MD = "md"
    CSV = "csv"
    JSON = "json"
    PNG = "png"


def report(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search, finished or not.")],
    form: Annotated[Format | None, typer.Option("--format", help="[as --out ends, or html]")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write [RUN_DIR/report.html].")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the name of the file alone.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write what a search found as one HTML page, or as Markdown, CSV, JSON or a picture."""

    def write() -> None:
        chosen = form or format_of(out)
        path = out or run_dir / f"report.{chosen}"
        from autotune.output.gather import gather

        found = gather(run_dir)
        _write(render(found, chosen), path, is_named=out is not None)
        from autotune.output.report_facts import answer

        if as_json:
            print_json({"file": str(path), "format": str(chosen), "answer": answer(found)})
        elif quiet:
            print_text(str(path))
        else:
            print_text(answer(found), f"written: {path}")

    guarded(write, as_json=as_json, debug=debug)


def format_of(out: Path | None) -> Format:
    """Return the format that a file's name asks for; HTML where there is none.

    Raises:
        InputError: The name ends otherwise.
    """
    if out is None:
        return Format.HTML
    ending = out.suffix.lower().lstrip(".")
    if ending not in list(Format):
        raise InputError(f"--out {out}: its name doesn't say the format; add --format {'|'.join(Format)}")
    return Format(ending)


def render(found: RunReport, chosen: Format) -> bytes:
    """Return the report in a format.

    Raises:
        MachineError: What draws pictures isn't installed.
    """
    if chosen is Format.HTML:
        from autotune.output.report_html import html_report

        return html_report(found).encode()
    if chosen is Format.JSON:
        return (found.model_dump_json(indent=2) + "\n").encode()
    if chosen is Format.PNG:
        from autotune.output.report_png import png_report

        return png_report(found)
    from autotune.output.report_text import csv_report, markdown_report

    return (csv_report(found) if chosen is Format.CSV else markdown_report(found)).encode()


def _write(content: bytes, path: Path, *, is_named: bool) -> None:
    from autotune.value import save_bytes, write_bytes

    try:
        (save_bytes if is_named else write_bytes)(content, path)
    except OSError as error:
        raise InputError(f"--out {path}: can't be written: {error.strerror}") from None


def explain(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search that has found something.")],
    max_time: Annotated[str | None, typer.Option(help="Begin no trial beyond this, such as 10m [find's].")] = None,
    trust_run_dir: TrustRunDir = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what each knob of the winner brought, by taking it away; what is known isn't measured again."""

    def run() -> None:
        from autotune.output.progress import Progress
        from autotune.search.explain import explain as explained
        from autotune.units import parse_time_s

        console = stderr(quiet=quiet, verbose=verbose)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is a Ctrl-C
        limit_s = None if max_time is None else parse_time_s(max_time)
        with Progress(console, verbose=verbose) as progress:
            found = explained(run_dir, max_time_s=limit_s, trust_run_dir=trust_run_dir, observer=progress)
        if as_json:
            print_json({**found.model_dump(mode="json"), "together": found.together, "settled": found.is_settled})
            return
        from autotune.output.explanation_table import explanation_table

        stdout().print(explanation_table(found), highlight=False)
        if not quiet:
            print_text(f"`autotune report {run_dir}` shows it")

    guarded(run, as_json=as_json, debug=debug)
