"""Commands on a finished search: `autotune report`, `autotune explain`, `autotune dashboard` and `autotune export`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from autotune.cli.console import (
    Json,
    Quiet,
    TrustRunDir,
    Verbose,
    guarded,
    print_json,
    print_text,
    stderr,
    stdout,
    writing,
)
from autotune.errors import InputError


@guarded
def report(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search, finished or not.")],
    form: Annotated[Literal["html", "json"] | None, typer.Option("--format", help="[as --out ends, or html]")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write [RUN_DIR/report.html].")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the name of the file alone.")] = False,
    as_json: Json = False,
) -> None:
    """Write what a search found as one HTML page, or as JSON."""
    from autotune.output.gather import gather
    from autotune.output.report import answer, html_report
    from autotune.value import save_bytes, write_bytes

    chosen = form or ("html" if out is None else out.suffix.lower().lstrip("."))
    if chosen not in ("html", "json"):
        raise InputError(f"--out {out}: its name doesn't say the format; add --format html|json")
    path, found = out or run_dir / f"report.{chosen}", gather(run_dir)
    content = found.model_dump_json(indent=2) + "\n" if chosen == "json" else html_report(found)
    with writing(f"--out {path}"):
        (write_bytes if out is None else save_bytes)(content.encode(), path)
    if as_json:
        print_json({"file": str(path), "format": chosen, "answer": answer(found)})
    elif quiet:
        print_text(str(path))
    else:
        print_text(answer(found), f"written: {path}")


@guarded
def explain(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search that has found something.")],
    max_time: Annotated[str | None, typer.Option(help="Begin no trial beyond this, such as 10m [find's].")] = None,
    trust_run_dir: TrustRunDir = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Measure what each knob of the winner contributes, by putting it back to the baseline's value."""
    from autotune.output.progress import Progress
    from autotune.output.table import explanation_table
    from autotune.planning.options import SearchOptions, options_of
    from autotune.search.explain import explain as explained

    console = stderr(quiet=quiet, verbose=verbose)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is a Ctrl-C
    limit_s = options_of(SearchOptions, {"model": "", "max_time": max_time}).max_time_s
    with Progress(console, verbose=verbose) as progress:
        found = explained(run_dir, max_time_s=limit_s, trust_run_dir=trust_run_dir, observer=progress)
    if as_json:
        print_json({**found.model_dump(mode="json"), "together": found.together, "settled": found.is_settled})
        return
    stdout().print(explanation_table(found), highlight=False)
    if not quiet:
        print_text(f"`autotune report {run_dir}` shows it")


@guarded
def dashboard(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search, finished or not.")],
    host: Annotated[str, typer.Option(help="Address to listen at; no password guards it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")] = 8080,
    as_json: Json = False,
) -> None:
    """Show a search in optuna-dashboard, until Ctrl-C."""
    from autotune.integrations.dashboard import application, is_loopback, server

    with server(host, port, application(run_dir, host)) as listening:
        if not is_loopback(host):
            warning = f"warning: --host {host}: whoever reaches it sees this search; no password is asked for"
            stderr().print(warning, highlight=False, soft_wrap=True)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listening.server_port}/"
        if as_json:
            print_json({"url": url, "run_directory": str(run_dir)})
        else:
            print_text(f"{run_dir}: {url} (Ctrl-C ends it)")
        try:
            listening.serve_forever()
        except KeyboardInterrupt:
            return


_KINDS = "training-args, python, accelerate, accelerate-loop, deepspeed, fsdp, trl"


@guarded
def export(
    best: Annotated[Path, typer.Argument(help="best-config.json, or the run directory it lies in.")],
    to: Annotated[str, typer.Option(help=f"{_KINDS}, or all that can train it.")] = "all",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File, or a directory; for all a directory.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the names of the files alone.")] = False,
    as_json: Json = False,
) -> None:
    """Write the best configuration as a script, or as files that other tools read."""
    from autotune.exports import launch_files, targets
    from autotune.storage.run_directory import ANSWER_FILE
    from autotune.tuning_result import load

    path = best / ANSWER_FILE if best.is_dir() else best
    result, answer = load(path), str(path)
    if to == targets.ALL:
        found, left_out = targets.drafts(result, answer)
        files, launch = targets.files_of_all(result, found, answer), launch_files.launch_commands(result, answer)
    else:
        found, left_out = {to: targets.draft(result, to, answer)}, {}
    if output is None:
        if to == targets.ALL:
            raise InputError(f"the files need a directory (--output DIR); a single one is printed by --to: {_KINDS}")
        if as_json:
            raise InputError("--json lists the files that were written, so it needs --output")
        sys.stdout.writelines(found[to].files.values())
        if not quiet:
            print_text(*(f"not expressed: {line}" for line in found[to].lost), file=sys.stderr)
        return
    folder = output
    if to != targets.ALL:  # a single file, which goes there as it is called, or under another name
        folder = output if output.is_dir() else output.parent
        found[to] = found[to].placed(output / next(iter(found[to].files)) if output.is_dir() else output)
        files, launch = found[to].files, found[to].launch
    with writing(f"--output {folder}"):
        written = launch_files.written(files, folder)
    missing = targets.missing_script(result, answer, launch, files)
    lost = {target: draft.lost for target, draft in found.items() if draft.lost}
    if as_json:
        document = {"files": list(map(str, written)), "launch": launch, "not_expressed": lost, "left_out": left_out}
        print_json({**document, **({"note": missing} if missing else {})})
    elif quiet:
        print_text(*map(str, written))
    else:
        print_text(*(f"written: {file}" for file in written), *(f"launch:  {command}" for command in launch))
        print_text(*([f"note:    {missing}"] if missing else []))
        several = len(found) > 1
        print_text(*(f"not expressed: {f'{name}: ' * several}{line}" for name, lines in lost.items() for line in lines))
        print_text(*(f"left out: {reason}" for reason in left_out.values()))
