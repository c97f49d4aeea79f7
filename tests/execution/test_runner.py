"""Whatever a trial does, the runner gives back a result, and the next trial runs."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import benches
import psutil
import pytest
from benches import is_running, left_behind, misbehaviour
from factories import make_request, make_result, make_workload
from misbehaving import MISBEHAVIOURS
from running import process, wait_for

from autotune.errors import InfrastructureError, RunDirectoryError
from autotune.execution import runner as runner_module
from autotune.execution.job import marked, temporary_folder
from autotune.execution.launch import MARK_FILE, import_failure
from autotune.execution.outcome import read_tail
from autotune.execution.places import check_disk
from autotune.execution.runner import LocalRunner
from autotune.value import read_value
from autotune.values.config import Parallelism
from autotune.values.hardware import detect
from autotune.values.trial import DescribeRequest, Measurement, TrialResult, TrialStatus

MIB = 1 << 20
LARGE = {"per_device_train_batch_size": 256}  # takes some 60 MiB
SMALL_BYTES = 20 * MIB


def marked_by(bench) -> list[int]:
    return marked(json.loads((bench.run_directory / MARK_FILE).read_text())["mark"])


def launcher_pid(bench) -> int:
    return next(pid for pid in marked_by(bench) if psutil.Process(pid).ppid() == os.getpid())


def assert_goes_on(bench) -> None:
    assert bench.misbehave("refuse").outcome.cause == "planted"


def test_a_cold_compile_finds_nothing_and_leaves_nothing(bench):
    request = bench.request(workload=misbehaviour("look_at_the_compile_cache"))
    result = bench.runner.run(request.model_copy(update={"cold_compile": True}))
    assert result.status is TrialStatus.COMPLETED, result.outcome
    found = bench.seen(result)
    cache = Path(found["TORCHINDUCTOR_CACHE_DIR"])
    assert (cache.parent, Path(found["TRITON_CACHE_DIR"])) == (bench.directory(result), cache / "triton")
    assert (found["at first"], found["after"]) == ([], False)


def test_the_same_request_gives_the_same_loss_whatever_ran_between_and_no_worker_outlives_its_trial(bench):
    request = bench.request(config={"dataloader_num_workers": 1})
    result = bench.runner.run(request)
    assert isinstance(result.outcome, Measurement)
    assert result.request == request
    assert result.measurement.samples_per_second > 0
    assert result.duration_s > 0
    assert read_value(TrialResult, bench.directory(result) / "result.json") == result
    assert not (bench.directory(result) / "trainer").exists()
    assert marked_by(bench) == [launcher_pid(bench)]
    bench.misbehave("change_the_process")
    again = bench.runner.run(request)
    assert (again.measurement.loss, again.measurement.effects) == (result.measurement.loss, result.measurement.effects)


def test_running_out_of_memory_is_real_and_the_next_trial_runs(bench):
    result = bench.run(config=LARGE, limits={"memory_bytes": SMALL_BYTES})
    assert result.status is TrialStatus.OUT_OF_MEMORY
    assert re.fullmatch(r"[\d.]+ [MG]iB were asked for with .* in use; the budget is 20 MiB", result.outcome.cause)
    assert result.outcome.memory.peak_bytes < 1.05 * (SMALL_BYTES + (16 << 20))  # the limit has room for generated code
    assert "DefaultCPUAllocator" in bench.log(result)
    assert bench.measured(config=LARGE).memory.peak_bytes > 1.2 * SMALL_BYTES


@pytest.mark.parametrize(("name", "status", "cause", "logged"), MISBEHAVIOURS)
def test_a_trial_without_a_result_has_a_status_a_cause_and_the_end_of_its_log(bench, name, status, cause, logged):
    result = bench.misbehave(name)
    assert result.status == status
    assert result.outcome.cause.startswith(cause)
    assert "\n" not in result.outcome.cause
    assert logged in read_tail(bench.directory(result) / "log.txt", lines=15)


@pytest.mark.parametrize(
    ("name", "status", "cause"),
    [("hang_after_the_result", "invalid", "planted"), ("ignore_sigterm", "timed out", "no result within 2 s")],
)
def test_at_its_time_limit_a_process_is_ended_and_a_result_that_it_has_written_counts(bench, name, status, cause):
    result = bench.misbehave(name, timeout_s=2)
    assert (result.status, result.outcome.cause) == (status, cause)


def test_a_kill_by_the_hosts_out_of_memory_killer_is_out_of_memory(bench, monkeypatch):
    counts = iter([7, 8])
    monkeypatch.setattr(runner_module, "host_oom_kills", lambda: next(counts))
    result = bench.misbehave("kill_itself")
    assert result.status is TrialStatus.OUT_OF_MEMORY
    assert "out-of-memory killer" in result.outcome.cause


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_launcher_that_is_killed_during_a_trial_takes_all_its_ranks_along_and_is_replaced(own_bench, ranks):
    config = {"parallelism": Parallelism(world_size=ranks)}
    result = own_bench.run(config=config, workload=misbehaviour("kill_the_launcher"))
    assert (result.status, result.outcome.cause) == (TrialStatus.CRASHED, "the process that runs trials died with it")
    started = [*own_bench.process(result)["pids"], *left_behind(own_bench.directory(result))]
    assert [pid for pid in started if is_running(pid)] == []
    assert len(own_bench.process(result)["pids"]) == ranks
    assert_goes_on(own_bench)


def test_a_launcher_that_falls_silent_is_given_up_with_its_trial(own_bench, monkeypatch):
    monkeypatch.setattr(runner_module, "LAUNCHER_GRACE_S", 1.0)
    result = own_bench.misbehave("stop_the_launcher", timeout_s=2)
    assert (result.status, result.outcome.cause) == (TrialStatus.TIMED_OUT, "no result within 2 s")
    assert not is_running(own_bench.process(result)["pid"])
    assert_goes_on(own_bench)


def test_an_interrupted_trial_is_ended_and_the_runner_is_as_good_as_before(own_bench):
    request = own_bench.request(workload=misbehaviour("hang"))
    path = own_bench.run_directory / "trials" / f"{request.number:04d}" / "process.json"

    def interrupt() -> None:
        wait_for(path)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        own_bench.runner.run(request)
    thread.join()
    assert not is_running(json.loads(path.read_text())["pid"])
    assert_goes_on(own_bench)
    os.kill(pid := launcher_pid(own_bench), signal.SIGKILL)  # between two trials, which costs none
    while is_running(pid):
        time.sleep(0.01)
    assert_goes_on(own_bench)


KILLED_SEARCH = """
import sys
import autotune.execution.launch
import benches
from pathlib import Path
from autotune.execution.runner import LocalRunner
from autotune.value import read_value
from autotune.values.hardware import detect
from autotune.values.trial import TrialRequest
autotune.execution.launch.launch_command = benches.light_command
run = Path(sys.argv[1])
with LocalRunner(run, detect("cpu"), entry="misbehaving:behave") as runner:
    runner.run(read_value(TrialRequest, run / "asked.json"))
"""


def test_a_search_ends_and_removes_what_a_killed_one_left_behind(own_bench):
    run = own_bench.run_directory
    request = own_bench.request(workload=misbehaviour("hang_with_children"))
    (run / "asked.json").write_text(request.model_dump_json())
    left = run / "trials" / f"{request.number:04d}" / "left.txt"
    with subprocess.Popen(**process("-c", KILLED_SEARCH, run)) as search:
        while search.poll() is None and (not left.exists() or left.read_text().count("\n") < 3):
            time.sleep(0.05)
        search.kill()
    orphans = left_behind(left.parent)
    folder = temporary_folder(json.loads((run / MARK_FILE).read_text())["mark"])
    assert all(map(is_running, orphans))  # what makes ending them necessary
    assert folder.is_dir()
    with LocalRunner(run, detect("cpu")):
        assert not any(map(is_running, orphans))
    assert (marked_by(own_bench), folder.exists()) == ([], False)


def test_a_library_that_cannot_be_imported_is_told_with_the_remedy(tmp_path, monkeypatch):
    """transformers says of a broken torchvision that 'get_reporting_integration_callbacks' could not be imported."""
    said = "operator torchvision::nms does not exist"
    about = "Metadata-Version: 2.1\nName: planted_vision\nVersion: 0.1\n"
    files = {
        "planted_vision/__init__.py": f"raise RuntimeError({said!r})",
        "planted_vision-0.1.dist-info/METADATA": about,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError) as raised:
        importlib.import_module("planted_vision")
    shown = ImportError("cannot import name 'get_reporting_integration_callbacks'")
    shown.__cause__ = raised.value
    told = f"planted_vision 0.1 can't be imported: RuntimeError: {said}; install the build of it for torch "
    assert import_failure(shown).startswith(told)
    with pytest.raises(ImportError) as raised:
        exec("raise ImportError('transformers is broken here')", {"__name__": "transformers.trainer"})
    assert import_failure(raised.value) == "ImportError: transformers is broken here"


def test_nothing_is_begun_where_the_disk_is_full_the_directory_is_gone_or_has_such_a_folder(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=16 << 10))
    with pytest.raises(InfrastructureError, match=r"the disk is full \(16 KiB are free\)"):
        check_disk(tmp_path)
    monkeypatch.undo()
    check_disk(tmp_path)
    with pytest.raises(InfrastructureError, match="was removed while the search ran"):
        check_disk(tmp_path / "gone")
    (mine := tmp_path / "trace" / "mine.json").parent.mkdir()
    mine.touch()
    with pytest.raises(RunDirectoryError, match=f"{mine.parent}: is in the way, and no search made it"):
        LocalRunner(tmp_path, detect("cpu")).ask("trace", "no:entry", make_workload(), timeout_s=1)
    assert mine.exists()


def test_operators_whose_compiling_was_ended_are_compiled_for_the_next_trial(own_bench, monkeypatch):
    monkeypatch.setattr(runner_module, "COMPILE", "misbehaving:be_killed_while_building")
    monkeypatch.setattr(runner_module, "operators_of", lambda request: ("some operator",))
    for _ in range(3):
        own_bench.misbehave("print_and_end")
    assert (own_bench.run_directory / "builds.txt").read_text() == "killed\nbuilt\n"


def test_another_python_runs_trials_without_the_module_path_of_this_one(own_bench, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", process()["env"]["PYTHONPATH"])
    monkeypatch.setattr(sys, "path", [*sys.path, "/of/this/environment"])
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH" > {tmp_path}/path\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    own_bench.runner.python = str(python)
    assert own_bench.misbehave("print_and_end").status is TrialStatus.CRASHED
    assert "/of/this/environment" not in (tmp_path / "path").read_text()


def test_the_time_limit_ends_all_before_the_first_trial_and_trials_have_their_own(own_bench):
    own_bench.runner.start()
    own_bench.runner.ends_at = time.perf_counter() + 1.0
    own_bench.runner.ask("asked", "misbehaving:hang", own_bench.request(), timeout_s=3600)
    with pytest.raises(InfrastructureError, match="a longer --max-time"):
        own_bench.runner.ask("asked", "misbehaving:hang", own_bench.request(), timeout_s=60)
    assert_goes_on(own_bench)


def test_a_launcher_is_waited_for_as_long_as_there_is_time(own_bench, monkeypatch):
    monkeypatch.setattr("autotune.execution.launch.launch_command", lambda *arguments, python: ["sleep", "3600"])
    own_bench.runner.ends_at = time.perf_counter() + 0.5
    with pytest.raises(InfrastructureError, match="a longer --max-time"):
        own_bench.runner.start()


def test_a_trial_whose_time_is_up_keeps_the_steps_that_it_has_measured(bench):
    endless = {"measure_steps": 50_000, "measure_time_s": 1e9, "relative_interval": 1e-12}
    result = bench.run(limits={"timeout_s": 6.0, **endless})
    assert result.status is TrialStatus.COMPLETED
    assert 10 <= len(result.measurement.step_times_s) < 50_000


def test_trials_in_turn_are_alive_at_once_and_each_waits_while_the_other_computes(bench):
    first, second = bench.in_turn({}, {"optim": "adafactor"})
    assert [r.status for r in (first, second)] == [TrialStatus.COMPLETED] * 2
    assert first.request.config != second.request.config
    turns = [len(r.measurement.step_times_s) / r.measurement.steps_per_turn for r in (first, second)]
    assert turns[0] == turns[1] >= 1
    for ours, theirs in ((first, second), (second, first)):
        assert ours.outcome.phases.waited_s > theirs.outcome.phases.measured_s / 2
        assert ours.active_s < ours.duration_s
        assert read_value(TrialResult, bench.directory(ours) / "result.json") == ours


def test_when_one_of_the_trials_in_turn_runs_out_of_memory_the_others_are_measured_alone(bench):
    ours, large = bench.in_turn({}, LARGE, memory_bytes=SMALL_BYTES)
    assert large.status is TrialStatus.OUT_OF_MEMORY
    assert ours.status is TrialStatus.COMPLETED
    assert ours.measurement.steps_per_turn is None


def test_one_place_runs_a_trial_while_it_is_waited_for():
    ran = []

    class OnePlace(runner_module.Runner):
        def run(self, request):
            if request.number == 4:
                raise KeyboardInterrupt
            ran.append(request)
            return make_result(number=request.number)

    runner, request = OnePlace(), make_request(number=3)
    runner.begin(request)
    assert (runner.free(), ran) == (0, [])
    assert runner.wait().request.number == 3
    assert (runner.free(), ran) == (1, [request])
    runner.begin(make_request(number=4))
    with pytest.raises(KeyboardInterrupt):
        runner.wait()
    assert runner.free() == 1


def test_a_launcher_that_can_not_start_or_fork_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.execution.launch.launch_command", benches.light_command)
    forkless = f"import os; os.fork = lambda: os.stat('/dev/null/x'); {benches.LIGHT}"
    broken = benches.LIGHT.replace("True", "1 / 0")
    killed = "import os; print('a warning', flush=True); os.kill(os.getpid(), 9)"
    faults = {broken: "did not start: ZeroDivisionError", killed: "killed by signal 9", forkless: "NotADirectoryError"}
    for code, said in faults.items():
        monkeypatch.setattr("benches.LIGHT", code)
        with LocalRunner(tmp_path, detect("cpu")) as runner, pytest.raises(InfrastructureError, match=said):
            runner.describe(DescribeRequest(workload=make_workload()))
