"""Real trials of a tiny model, one after the other, of which the trial or the launcher is killed again and again.

`pytest tests/faults/test_real_kills.py -m slow --real-kills 100` kills each a hundred times.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from faults.kept import Kept
from faults.replaying import MODEL, TABLES, Search
from running import process

from autotune.execution.environment import shared_files
from autotune.values.trial import TrialStatus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LONGEST_S = 1.5  # from the beginning of a trial until it is killed


def start(search: Search, trials: int) -> subprocess.Popen:
    options = {
        "--model": MODEL, "--space": TABLES / "space.yaml", "--device": "cpu", "--seq-len": 32, "--global-batch": 16,
        "--effort": "quick", "--max-time": "2h", "--max-trials": trials, "--run-dir": search.run,
    }  # fmt: skip
    command = process("-m", "autotune", "find", *itertools.chain(*options.items()), AUTOTUNE_HOME=str(search.home),
                      AUTOTUNE_RECORD="")  # fmt: skip
    return subprocess.Popen(**command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def running(run: Path) -> dict[int, int]:
    """The trial that runs now, if one does: its number and its process."""
    found = {}
    for path in run.glob("trials/*/process.json"):
        if not (path.parent / "result.json").exists():
            try:
                found[int(path.parent.name)] = json.loads(path.read_text())["pid"]
            except (OSError, ValueError):  # it has just begun, or ended
                continue
    return found


def kill_again_and_again(search: subprocess.Popen, run: Path, victim: str, kills: int) -> set[int]:
    """Kill the trials, or the launcher, so often, each while a trial runs; return the numbers of these."""
    killed: set[int] = set()
    while search.poll() is None and len(killed) < kills:
        for number, pid in running(run).items():
            if number == 0 or number in killed:  # the first gives something to lose
                continue
            try:
                trial = psutil.Process(pid)
                target = trial if victim == "trial" else trial.parent()
                time.sleep(random.uniform(0.0, LONGEST_S))
                if trial.is_running() and target.pid != search.pid:
                    target.send_signal(signal.SIGKILL)
                    killed.add(number)
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)
    return killed


@pytest.mark.parametrize("victim", ["trial", "launcher"])
def test_a_search_goes_on_when_its_trials_or_its_launcher_are_killed(victim, request, tmp_path):
    kills, shared = request.config.getoption("--real-kills"), shared_files()
    search = Search(tmp_path / "run", tmp_path / "home", tmp_path)
    begun = start(search, trials := kills + kills // 2 + 6)
    killed = kill_again_and_again(begun, search.run, victim, kills)
    _, errors = begun.communicate()
    assert begun.returncode == 0, errors
    assert len(killed) == kills
    kept = Kept(search)
    results = kept.look()
    assert sorted(results) == list(range(len(results)))
    assert sum(r.request.purpose.explores for r in results.values()) <= trials + 1  # the baseline
    again = {number for number, result in results.items() if any("it ran again" in line for line in result.warnings)}
    crashed = {number for number, result in results.items() if result.status is TrialStatus.CRASHED}
    lost = crashed if victim == "trial" else again
    assert crashed | again == lost <= killed
    assert len(lost) >= kills // 2  # the others had written what they measured
    kept.check_end()
    assert shared_files() <= shared
    print(f"{len(killed)} kills of the {victim}, {len(lost)} trials lost by them, {len(results)} trials")


@pytest.fixture
def small_group():
    """A control group of the kernel with 16 MiB of memory: whoever is moved into it and takes more is killed."""
    for folder, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(folder) / f"autotune-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(16 << 20))
        except OSError:
            continue
        yield group / "cgroup.procs"
        group.rmdir()
        return
    pytest.skip("no control group with a limit of memory can be made here")


def test_a_trial_that_the_kernel_kills_for_memory_is_out_of_memory(small_group, tmp_path):
    search = Search(tmp_path / "run", tmp_path / "home", tmp_path)
    begun, moved = start(search, 8), set()
    while begun.poll() is None and len(moved) < 2:
        for number, pid in running(search.run).items():
            if number and number not in moved:
                try:
                    small_group.write_text(str(pid))
                except ProcessLookupError:  # it has just ended
                    continue
                moved.add(number)
        time.sleep(0.01)
    _, errors = begun.communicate()
    assert begun.returncode == 0, errors
    kept = Kept(search)
    results = kept.look()
    causes = {number: results[number].outcome.cause for number in moved if results[number].measurement is None}
    assert causes
    assert set(causes.values()) == {"killed by the host's out-of-memory killer"}
    assert {results[number].status for number in causes} == {TrialStatus.OUT_OF_MEMORY}
    kept.check_end()
