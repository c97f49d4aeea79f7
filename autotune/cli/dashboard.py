"""`autotune dashboard`: optuna-dashboard on the trials of a search, finished or running."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.console import Debug, Json, guarded, print_json, print_text, stderr


def dashboard(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a search, finished or not.")],
    host: Annotated[str, typer.Option(help="Address to listen at; no password guards it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")] = 8080,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a search in optuna-dashboard, from a copy of its trials, until Ctrl-C."""

    def show() -> None:
        from autotune.integrations.dashboard import application, is_loopback, server
        from autotune.output.table import show_config

        with server(host, port, application(run_dir, words=show_config)) as listening:
            if not is_loopback(host):
                warning = f"warning: --host {host}: whoever reaches it sees this search; no password is asked for"
                stderr().print(warning, highlight=False, soft_wrap=True)
            url = f"http://{f'[{host}]' if ':' in host else host}:{listening.server_port}/"
            if as_json:
                print_json({"url": url, "run_directory": str(run_dir)})
            else:
                print_text(f"{run_dir}: {url} (Ctrl-C ends it; notes and changes made there are not kept)")
            try:
                listening.serve_forever()
            except KeyboardInterrupt:
                return

    guarded(show, as_json=as_json, debug=debug)
