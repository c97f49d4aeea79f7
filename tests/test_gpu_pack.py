"""The GPU pack, on the CPU with tiny models: the same steps, files and checks."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import autotune
from autotune.trial import Memory, TrialStatus

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_checks  # noqa: E402
import gpu_pack  # noqa: E402
from gpu_checks import Check, Story  # noqa: E402
from pack_report import Report  # noqa: E402

pytestmark = pytest.mark.slow  # searches of its own

MIB = 1 << 20


def run_pack(*arguments):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_pack.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """One whole pack: its exit code and its directory."""
    out = tmp_path_factory.mktemp("pack") / "out"
    done = run_pack("--device", "cpu", "--models", "tiny", "--out", out)
    return done, out, json.loads((out / "summary.json").read_text())


def test_a_pack_passes_its_checks(pack):
    done, _, summary = pack
    assert [c for c in summary["checks"] if not c["passed"]] == [], done.stdout
    assert done.returncode == 0
    assert summary["finished"]


def test_a_pack_makes_trials_run_out_of_memory(pack):
    _, _, summary = pack
    assert any("out of memory" in line for line in summary["searches"]["tiny-170mib"]["trials"])


def test_each_search_of_a_pack_leaves_an_answer(pack):
    _, out, summary = pack
    assert set(summary["searches"]) == {"tiny", "tiny-170mib"}
    for name, search in summary["searches"].items():
        assert autotune.load(out / f"{name}.json").verdict == search["verdict"]


def test_each_trial_of_a_pack_is_a_line_and_a_record(pack):
    _, out, summary = pack
    records = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    for name, search in summary["searches"].items():
        numbers = [r["result"]["request"]["number"] for r in records if r["search"] == name]
        assert numbers == list(range(len(search["trials"])))


def test_a_pack_says_where_it_ran_and_how(pack):
    _, _, summary = pack
    assert summary["hardware"]["versions"]["torch"]
    assert summary["launcher"]["forkable"] is True
    assert summary["export"]["exported"] > 0


def test_a_device_that_is_not_there_is_exit_code_3(tmp_path):
    done = run_pack("--device", "cuda:77", "--out", tmp_path / "out")
    assert done.returncode == 3
    assert "cuda:77" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_unknown_model_is_exit_code_2():
    done = run_pack("--device", "cpu", "--models", "tiny,huge")
    assert done.returncode == 2
    assert "huge" in done.stderr


def story(status=TrialStatus.COMPLETED, *, peak=1000, observed=1000, search="s", **memory):
    figures = Memory(allocated_bytes=800 * MIB, reserved_bytes=900 * MIB, device_bytes=peak * MIB)
    return Story(
        search=search,
        number=0,
        status=status,
        budget_bytes=2000 * MIB,
        memory=figures.model_copy(update=memory),
        observed_bytes=observed * MIB,
        line="a trial",
    )


def failed(stories, capped=()):
    return {check.name for check in gpu_checks.check_trials(stories, capped=capped) if not check.passed}


def test_trials_as_they_should_be_pass_every_check():
    stories = [story(), story(TrialStatus.OUT_OF_MEMORY, peak=1990, observed=1990)]
    assert failed(stories, capped=["s"]) == set()


BAD = {
    "no trial crashed": story(TrialStatus.CRASHED),
    "no completed trial reports more than its budget": story(peak=2010, observed=2010),
    "allocated <= reserved <= device memory": story(reserved_bytes=700 * MIB),
    "the reported peak is the one seen from outside": story(peak=1000, observed=1300),
    "no trial takes more than its budget, seen from outside": story(
        TrialStatus.OUT_OF_MEMORY, peak=1990, observed=2300
    ),
}


@pytest.mark.parametrize(("name", "bad"), BAD.items(), ids=list(BAD))
def test_each_check_fails_for_its_own_reason(name, bad):
    assert failed([story(), bad]) == {name}


def test_an_evaluation_that_was_given_up_is_seen_from_outside_and_not_reported():
    checks = {"the reported peak is the one seen from outside"}
    assert failed([story(peak=1000, observed=1900)._replace(gave_up=True)]) == set()
    assert failed([story(peak=1900, observed=1000)._replace(gave_up=True)]) == checks


def test_a_capped_search_in_which_nothing_ran_out_fails():
    assert failed([story()], capped=["s"]) == {"s: the budget is enforced, and the search goes on"}


def test_a_pack_without_trials_fails():
    assert "no trial crashed" in failed([])


def test_a_check_is_on_disk_at_once(tmp_path):
    from autotune.hardware import detect

    report = Report(tmp_path, detect("cpu"))
    report.check(Check("a name", False, "why"))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["checks"] == [{"name": "a name", "passed": False, "detail": "why"}]
    assert written["finished"] is False


def test_a_step_that_raises_is_a_failed_check_and_the_pack_goes_on(tmp_path):
    from autotune.hardware import detect

    report = Report(tmp_path, detect("cpu"))
    gpu_pack.step(report, "broken", lambda: 1 / 0)
    assert json.loads((tmp_path / "summary.json").read_text())["checks"][0]["detail"] == (
        "ZeroDivisionError: division by zero"
    )


def test_an_alarm_ends_what_waits():
    with pytest.raises(gpu_pack.OutOfTime), gpu_pack._alarm(0.05):
        time.sleep(30)


def test_an_outer_alarm_is_due_after_an_inner_one_was_not():
    def wait():
        with gpu_pack._alarm(20):
            pass
        time.sleep(30)

    with pytest.raises(gpu_pack.OutOfTime), gpu_pack._alarm(0.1):
        wait()
