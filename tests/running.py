"""Python as a user starts it: in a process of its own, which finds the package and what the tests import."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def process(*words: object, cwd: Path | None = None, **environment: str) -> dict[str, Any]:
    """Return what `subprocess` takes to start Python with these words."""
    path = os.pathsep.join(dict.fromkeys([str(ROOT), str(ROOT / "tests"), *filter(None, sys.path)]))
    own = {**os.environ, "PYTHONPATH": path, **environment}
    return {"args": [sys.executable, *map(str, words)], "cwd": cwd, "text": True, "env": own}


def python(*words: object, timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python; the options are those of `process`."""
    return subprocess.run(**process(*words, **options), capture_output=True, timeout=timeout)


def printed(*words: object, **options: Any) -> list[str]:
    """Return the lines that a program prints, which may not fail."""
    done = python(*words, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def run_example(name: str, *arguments: object, cwd: Path) -> list[str]:
    """Return the lines that an example prints; a warning or an error of its own would fail it."""
    quiet = {"HF_DATASETS_CACHE": str(cwd / "datasets"), "HF_HUB_OFFLINE": "1"}
    return printed(ROOT / "examples" / name, *arguments, cwd=cwd, timeout=450, **quiet)


def run_at_once(program: str, argument: str, names: Iterable[str]) -> list[tuple[int, str]]:
    """Return exit code and standard error of processes that begin their work together, one for each name.

    Args:
        program: Says "ready", waits for a line, and then works; it is told `argument` and its name.
        argument: The same for all.
        names: One for each.
    """
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    started = [process("-c", program, argument, name) for name in names]
    processes = [subprocess.Popen(**each, **pipes) for each in started]
    try:
        for each in processes:
            assert each.stdout.readline() == "ready\n"
        for each in processes:
            each.stdin.write("\n")
            each.stdin.flush()
        errors = [each.communicate(timeout=120)[1] for each in processes]
    finally:
        for each in processes:
            each.kill()
    return [(each.returncode, error) for each, error in zip(processes, errors, strict=True)]


def until(holds: Callable[[], Any], *, limit_s: float = 120.0, while_runs: subprocess.Popen[str] | None = None) -> Any:
    """Return what a function gives, once that is something; a program that is waited for may not have ended."""
    deadline = time.monotonic() + limit_s
    while not (found := holds()):
        assert while_runs is None or while_runs.poll() is None, while_runs.stderr.read()
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return found


def wait_for(path: Path) -> str:
    """Return what stands in a file that another process writes, once something does."""
    return until(lambda: path.exists() and path.read_text())
