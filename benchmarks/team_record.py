r"""Counts what is lost when searches share a record on a server that is stopped, and one of them is killed.

    AUTOTUNE_RECORD=postgresql://user:password@host/autotune_test python benchmarks/team_record.py \
        --stop "pg_ctlcluster 15 main stop -m fast" --start "pg_ctlcluster 15 main start"

Every search is a process with the true tuner, writer and record; its trials are replayed from a recorded table, and
take `--pace` seconds each. When a third of the trials are done, the server is stopped for `--down` seconds, and in the
middle of that the first search is killed with SIGKILL. Whatever it left is caught up by `autotune history sync`. Then
every finished trial, which is a file, must be in the record once; the last line is the result as JSON.

The record must be empty: name a database to try this on.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from provenance import ROOT, provenance, results_path
from searching.replay import ReplayClock, ReplayRunner

from autotune.errors import AutotuneError
from autotune.execution.runner import Runner
from autotune.search.exhaustive import plan_of
from autotune.search.tuner import Tuner
from autotune.storage.database import VARIABLE
from autotune.storage.record import Record, record
from autotune.storage.run_directory import RunDirectory
from autotune.storage.sync import Identity, recorded_trials
from autotune.storage.writer import record_writer
from autotune.value import write_text, write_value
from autotune.values.events import Event, Note, TrialEnded
from autotune.values.hardware import detect
from autotune.values.recorded_table import load_table
from autotune.values.trial import TrialRequest, TrialResult

TABLE = ROOT / "benchmarks" / "tables" / "llama-1m.jsonl"
REPORT = "held_up.json"

# A search that hasn't ended this long after its last trial is due hangs.
_OVERTIME_S = 180.0

# When the server is stopped: after this share of all trials.
_STOP_AFTER = 1 / 3


class PacedRunner(Runner):
    """Replays trials, each of which takes its time, and leaves their files as a real runner does."""

    def __init__(self, replay: ReplayRunner, directory: Path, pace_s: float) -> None:
        self._replay = replay
        self._directory = directory
        self._pace_s = pace_s

    def run(self, request: TrialRequest) -> TrialResult:
        """Return what was recorded, after a while."""
        time.sleep(self._pace_s)
        result = self._replay.run(request)
        folder = self._directory / "trials" / f"{request.number:04d}"
        folder.mkdir(parents=True)
        write_value(result, folder / "result.json")
        return result


def search(run_dir: Path, options: argparse.Namespace) -> None:
    """Run one search, as `autotune.api` does, and write down how long the record held it up."""
    table = load_table(TABLE)
    plan = plan_of(table, seed=options.seed, max_trials=options.trials).model_copy(update={"record": True})
    clock = ReplayClock()
    directory = RunDirectory.create(run_dir)
    with directory:
        directory.write_plan(plan)
        runner = PacedRunner(ReplayRunner(table, clock, seed=options.seed), run_dir, options.pace)
        held_up_s: list[float] = []
        with record_writer(plan, directory, _print) as writer:

            def listen(event: Event) -> None:
                began = time.monotonic()
                writer(event)
                if isinstance(event, TrialEnded):
                    held_up_s.append(time.monotonic() - began)

            writer.earlier()
            writer.end(Tuner(plan, directory, runner, listen, clock=clock.now).run())
            ended = time.monotonic()
        figures = {"between_trials_s": held_up_s, "at_the_end_s": time.monotonic() - ended}
        write_text(json.dumps(figures), run_dir / REPORT)


def _print(event: Event) -> None:
    if isinstance(event, Note):
        print(event.text, flush=True)


def trials_of(run_dir: Path) -> set[int]:
    """Return the numbers of the finished trials that belong into the record."""
    directory = RunDirectory(run_dir)
    return {trial.number for trial in recorded_trials(directory, directory.results())}


def count_finished(run_dirs: list[Path]) -> int:
    """Return how many trials have finished in all."""
    return sum(len(list(run_dir.glob("trials/*/result.json"))) for run_dir in run_dirs)


class Server:
    """The database's server, stopped and started by commands of the user."""

    def __init__(self, stop: str, start: str) -> None:
        self._commands = {"stop": stop, "start": start}

    def do(self, what: str) -> None:
        """Stop or start it.

        Raises:
            SystemExit: It didn't work.
        """
        done = subprocess.run(self._commands[what], shell=True, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"team_record: --{what} failed: {' '.join(done.stderr.split())}")


def trouble(server: Server, processes: list[subprocess.Popen[bytes]], run_dirs: list[Path], down_s: float) -> None:
    """Stop the server for a while, and kill the first search in the middle of that."""
    server.do("stop")
    print(f"the server is stopped after {count_finished(run_dirs)} trials", flush=True)
    time.sleep(down_s / 2)
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait()
    print("a search is killed", flush=True)
    time.sleep(down_s / 2)
    server.do("start")
    print(f"the server is started after {count_finished(run_dirs)} trials", flush=True)


def run_all(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run the searches through the trouble; return what became of each."""
    run_dirs = [folder / f"search-{number}" for number in range(options.searches)]
    processes = []
    for seed, run_dir in enumerate(run_dirs):
        own = ["--search", run_dir, "--seed", seed, "--trials", options.trials, "--pace", options.pace]
        with run_dir.with_suffix(".log").open("wb") as log:
            processes.append(
                subprocess.Popen([sys.executable, __file__, *map(str, own)], stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        while count_finished(run_dirs) < _STOP_AFTER * options.trials * options.searches:
            if all(process.poll() is not None for process in processes):
                sys.exit(f"team_record: the searches ended too soon; see {folder}")
            time.sleep(0.1)
        trouble(Server(options.stop, options.start), processes, run_dirs, options.down)
        deadline = time.monotonic() + 2 * options.trials * options.pace + _OVERTIME_S
        for process in processes:
            process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_outcome(run_dir, process.returncode) for run_dir, process in zip(run_dirs, processes, strict=True)]


def _outcome(run_dir: Path, returncode: int) -> dict[str, Any]:
    """Return what became of a search that has ended, before anything is caught up."""
    report = run_dir / REPORT
    held_up = json.loads(report.read_text()) if report.exists() else None
    summary = None
    if held_up is not None:
        between = held_up["between_trials_s"]
        summary = {"most_s": max(between), "in_all_s": sum(between), "at_the_end_s": held_up["at_the_end_s"]}
    return {
        "search": run_dir.name,
        "exit_code": returncode,
        "finished_trials": len(trials_of(run_dir)),
        "held_up": summary,
        "told": run_dir.with_suffix(".log").read_text().splitlines(),
    }


def catch_up(run_dirs: list[Path]) -> list[str]:
    """Return what `autotune history sync` says of the run directories."""
    command = [sys.executable, "-m", "autotune", "history", "sync", *map(str, run_dirs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "COLUMNS": "500"})
    return (done.stdout + done.stderr).replace(f"{run_dirs[0].parent}/", "").splitlines()


def compared(database: Record, run_dirs: list[Path]) -> dict[str, int]:
    """Return how the record differs from the files: trials that it misses, has twice, or has without a file."""
    searches = database.searches()
    rows = collections.Counter((s.run_directory, trial.number) for s in searches for trial in s.trials)
    files = {(str(run_dir.absolute()), number) for run_dir in run_dirs for number in trials_of(run_dir)}
    identities = {Identity.model_validate_json((run_dir / "record.json").read_bytes()).id for run_dir in run_dirs}
    return {
        "finished": len(files),
        "recorded": sum(rows.values()),
        "missing": len(files - set(rows)),
        "twice": sum(rows.values()) - len(rows),
        "without_a_file": len(set(rows) - files),
        "searches": len(searches),
        "of_others": len({s.id for s in searches} - identities),
    }


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help=f"of the record; the environment's {VARIABLE} shows it to nobody else")
    parser.add_argument("--stop", help="command that stops the server")
    parser.add_argument("--start", help="command that starts it again")
    parser.add_argument("--searches", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--trials", type=int, default=40, help="of each search, at the most (default: %(default)s)")
    parser.add_argument("--pace", type=float, default=2.0, help="seconds a trial takes (default: %(default)s)")
    parser.add_argument("--down", type=float, default=30.0, help="seconds without a server (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for the result (default: under benchmarks/results)")
    parser.add_argument("--search", type=Path, help=argparse.SUPPRESS)  # one of the searches, in this run directory
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.url is not None:
        os.environ[VARIABLE] = options.url
        sys.argv = [word.replace(options.url, "URL") for word in sys.argv]  # which stand in the result
    if options.search is None and not (options.stop and options.start):
        parser.error("--stop and --start say how the server is stopped and started")
    return options


def main() -> None:
    """Run the searches and compare their files with the record."""
    options = parse_options()
    if options.search is not None:
        search(options.search, options)
        return
    try:
        database = record()
        if database is None or database.searches(brief=True):
            sys.exit(f"team_record: {VARIABLE} or --url must name a record that is empty")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            searches = run_all(options, folder)
            run_dirs = [folder / found["search"] for found in searches]
            before = compared(database, run_dirs)
            said = catch_up(run_dirs)
            after = compared(database, run_dirs)
    except AutotuneError as error:
        sys.exit(f"team_record: {error}")
    hardware = detect("cpu")
    asked = {name: getattr(options, name) for name in ("searches", "trials", "pace", "down", "stop", "start")}
    found = {"searches": searches, "before_sync": before, "sync_said": said, "after_sync": after}
    document = {**provenance(hardware), "database": database.where, "options": asked, **found}
    path = options.out or results_path(f"team-record-{database.where.partition('+')[0]}.json", hardware)
    write_text(json.dumps(document, indent=1) + "\n", path)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
