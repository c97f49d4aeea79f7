"""The stand-in's clock and the faults it plants. Times are its own, so lower bounds and ratios of them are exact."""

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest
from running import printed, process, python

pytestmark = pytest.mark.cuda

BEGIN = """
import json, torch
matrix = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16)
def timed(work, times=1):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times): work()
    end.record()
    was_done = end.query()
    torch.cuda.synchronize()
    return start.elapsed_time(end), was_done
"""
# 1.1 TFLOP at 230 TFLOP/s, less what a sum of 8,192 loses.
PRODUCT_MS = 2 * 8192**3 / 230e9 * (8192 + 128) / 8192


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKECUDA_STATE", str(tmp_path / "devices"))
    monkeypatch.setenv("FAKECUDA_NAME", "NVIDIA A100-SXM4-80GB")
    monkeypatch.setenv("FAKECUDA_SMS", "108")


def run(code: str, clock: str = "1", **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-c", BEGIN + code, FAKECUDA_CLOCK=clock, **environment)


def told(code: str, clock: str = "1", **environment: str):
    return json.loads(printed("-c", BEGIN + code, FAKECUDA_CLOCK=clock, **environment)[-1])


def test_launches_run_ahead_and_events_tell_when_their_stream_is_done():
    ms, was_done = told("print(json.dumps(timed(lambda: matrix @ matrix, 40)))")
    assert ms >= 40 * PRODUCT_MS
    assert not was_done
    assert told("print(json.dumps(timed(lambda: matrix @ matrix, 40)))", clock="0")[1]


def test_a_stream_waits_for_an_event_of_another_and_graphs_take_the_time_of_their_kernels():
    waited, replayed, single = told(
        """
other, done, after = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
for _ in range(20): matrix @ matrix
done.record()
other.wait_event(done)
after.record(other)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(10): matrix @ matrix
print(json.dumps([done.elapsed_time(after), timed(graph.replay)[0], timed(lambda: matrix @ matrix)[0]]))
"""
    )
    assert waited >= 0
    assert replayed >= 10 * PRODUCT_MS
    assert single >= PRODUCT_MS


@pytest.mark.parametrize(("disturbance", "least"), [("ramp=0.5", 1.3), ("cap=0.5", 1.0)])
def test_a_cold_chip_is_slower_than_a_warm_one_and_a_capped_one_stays_slow(disturbance, least):
    code = "cold = timed(lambda: matrix @ matrix)[0]\nfor _ in range(800): matrix @ matrix\n"
    code += "torch.cuda.synchronize()\nprint(json.dumps([cold, timed(lambda: matrix @ matrix, 200)[0] / 200]))"
    cold, warm = told(code, clock=disturbance)
    assert cold >= 1.4 * PRODUCT_MS
    assert warm >= (1.4 if disturbance.startswith("cap") else 1.0) * PRODUCT_MS
    assert cold / warm >= least - 0.1


def test_time_passes_without_waiting_where_the_clocks_are_moved_on():
    code = """
import threading, time
before = time.perf_counter(), time.time()
ms = timed(lambda: matrix @ matrix, 200_000)[0]  # a quarter of an hour
threading.Event().wait(0.2)
time.sleep(0.2)
print(json.dumps([ms / 1000, time.perf_counter() - before[0], time.time() - before[1]]))
"""
    warp = Path(sysconfig.get_path("purelib"), "torch", "lib", "libfakecuda-warp.so")
    computed, elapsed, on_the_calendar = told(code, FAKECUDA_HOST="2", LD_PRELOAD=str(warp))
    assert computed >= 200 * PRODUCT_MS
    assert elapsed >= computed + 0.4
    assert on_the_calendar >= computed + 0.4


def test_an_error_stays_in_its_process_and_the_next_is_clean():
    code = """
said = []
for _ in range(200):
    try:
        matrix + 1
        torch.cuda.synchronize()
    except Exception as error:
        said.append(str(error).splitlines()[0])
print(json.dumps(said))
"""
    said = told(code, FAKECUDA_FAULT="700@100#1")
    assert len(said) > 90
    assert all("an illegal memory access was encountered" in line for line in said)
    assert told(code, FAKECUDA_FAULT="700@100#1") == []


def test_a_lost_device_is_lost_to_later_processes_and_to_nvml():
    assert run("for _ in range(99): matrix + 1", FAKECUDA_FAULT="lost@50").returncode != 0
    assert "unknown error" in run("", FAKECUDA_FAULT="").stderr
    asked = "import pynvml; pynvml.nvmlInit(); pynvml.nvmlDeviceGetTemperature(pynvml.nvmlDeviceGetHandleByIndex(0), 0)"
    assert "GPU is lost" in python("-c", asked).stderr


def test_a_device_of_one_process_refuses_another():
    hold = process("-c", BEGIN + "print(flush=True); input()", FAKECUDA_EXCLUSIVE="1")
    with subprocess.Popen(**hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        refused = run("", FAKECUDA_EXCLUSIVE="1")
        other.communicate("\n")
    assert "busy or unavailable" in refused.stderr
    assert run("", FAKECUDA_EXCLUSIVE="1").returncode == 0


def test_a_search_on_the_clock_ends_with_an_answer(tmp_path):
    command = ["find", "--model", "gpt2", "--seq-len", "128", "--max-time", "150s", "--max-trials", "2"]
    command += ["--fix", "attention=sdpa,compile=none", "--run-dir", tmp_path / "run"]
    clock = "noise=0.002,process=0.002,ramp=0.1,drift=0.03"
    printed("-m", "autotune", *command, FAKECUDA_CLOCK=clock, AUTOTUNE_HOME=str(tmp_path / "home"))
    answer = json.loads((tmp_path / "run" / "best-config.json").read_text())
    assert answer["verdict"] in ("faster", "no_clear_winner", "undecided")
    assert answer["best"]["measurement"]["samples_per_second"] > 0
    assert answer["baseline"]["measurement"]["samples_per_second"] > 0
