"""Runs the same Python program in several processes that begin their work together."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def run_at_once(program: str, argument: str, names: Iterable[str]) -> list[tuple[int, str]]:
    """Return exit code and standard error of a process a name.

    Args:
        program: Says "ready", waits for a line, and then works; it is told `argument`, its name and the tests' folder.
        argument: The same for all.
        names: One for each.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", program, argument]
    processes = [subprocess.Popen([*command, name, here], env=environment, **pipes) for name in names]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]
