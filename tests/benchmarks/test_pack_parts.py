"""The parts of the GPU pack by themselves: how they are chosen and timed, and when each check fails."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from factories import make_failure, make_gpu, make_hardware, make_measurement, make_result

from autotune.training.build import build_model
from autotune.values.estimate import CostEstimate, MemoryBreakdown
from autotune.values.hardware import detect
from autotune.values.trial import Interval, Memory, TrialStatus

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_pack  # noqa: E402
from pack import visible  # noqa: E402
from pack.alarm import OutOfTime, alarm  # noqa: E402
from pack.check import Check, Kind  # noqa: E402
from pack.configurations import Configuration  # noqa: E402
from pack.estimates import judged as judged_estimate  # noqa: E402
from pack.ground import Ground, ground_of  # noqa: E402
from pack.memory_watch import MemoryWatch  # noqa: E402
from pack.models import workload  # noqa: E402
from pack.part import CUDA, Part  # noqa: E402
from pack.report import Report  # noqa: E402
from pack.searches import SEARCHES  # noqa: E402
from pack.session import Session  # noqa: E402
from pack.stories import Story, check_trials, ran_out_and_went_on, story_of  # noqa: E402
from pack.table import DEADLINE_S, parts  # noqa: E402
from pack.trials import judged  # noqa: E402

MIB = 1 << 20
USUAL = ["t5-small", "bert-large-uncased", "t5-3b"]


def run_pack(*arguments):
    path = os.pathsep.join([str(BENCHMARKS.parent), *sys.path])
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_pack.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.fixture
def session(tmp_path):
    """A pack on the CPU in which nothing has run."""
    hardware = detect("cpu")
    report = Report(tmp_path / "out", hardware)
    (tmp_path / "scratch").mkdir()
    with MemoryWatch(hardware) as watch, Session(hardware, report, watch, tmp_path / "scratch") as made:
        yield made


def summary(session):
    return json.loads((session.report.directory / "summary.json").read_text())


def failed(session):
    return {c["name"]: c["detail"] for c in summary(session)["checks"] if not c["passed"]}


# The table


def test_all_parts_together_end_within_ten_minutes():
    assert sum(part.seconds for part in parts(USUAL)) <= DEADLINE_S <= 600


def test_parts_have_names_of_their_own():
    names = [part.name for part in parts(list(SEARCHES))]
    assert len(set(names)) == len(names)


def test_the_list_tells_each_part_its_seconds_and_its_needs():
    done = run_pack("--list")
    assert done.returncode == 0
    for part in parts(USUAL):
        assert re.search(rf"^{part.name} +{part.seconds} s  .*{'; needs' if part.needs else ''}", done.stdout, re.M)


def test_a_device_that_is_not_there_is_exit_code_3(tmp_path):
    done = run_pack("--device", "cuda:77", "--out", tmp_path / "out")
    assert done.returncode == 3
    assert "cuda:77" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--models", "--parts"])
def test_an_unknown_name_is_exit_code_2(option):
    done = run_pack("--device", "cpu", option, "huge")
    assert done.returncode == 2
    assert f"{option} huge: expected some of" in done.stderr


# The memory seen from outside


class _Slow(MemoryWatch):
    """A device that holds 100 bytes at the watch's first reading and none afterwards; its second reading takes time."""

    def __init__(self, hardware):
        super().__init__(hardware)
        self.readings = 0
        self.began, self.ends = threading.Event(), threading.Event()

    def used_bytes(self):
        if threading.current_thread() is not self._thread:
            return 0
        self.readings += 1
        if self.readings == 2:
            self.began.set()
            assert self.ends.wait(60)
        return 100 if self.readings == 1 else 0


def test_a_reading_that_began_before_a_reset_does_not_bring_back_an_earlier_peak():
    with _Slow(make_hardware()) as watch:
        assert watch.began.wait(60)
        assert watch.risen_bytes() == 100
        reset = threading.Thread(target=watch.reset)
        reset.start()
        reset.join(0.5)
        watch.ends.set()
        reset.join()
    assert watch.risen_bytes() == 0


# Running parts


def part(name, run, *, seconds=10, needs=()):
    return Part(name, "a test's", seconds, run, needs)


def test_a_part_that_raises_is_a_failed_check_and_the_pack_goes_on(session):
    ran = []
    gpu_pack.run([part("broken", lambda _: 1 / 0), part("next", lambda _: ran.append("next"))], session, 60)
    assert failed(session) == {"broken": "ZeroDivisionError: division by zero"}
    assert ran == ["next"]


def test_a_part_that_hangs_is_ended_and_the_next_one_has_its_time(session):
    given = []
    hanging = part("hanging", lambda _: time.sleep(60), seconds=1)
    gpu_pack.run([hanging, part("next", lambda s: given.append(s.seconds), seconds=DEADLINE_S / 2)], session, 4.0)
    assert list(failed(session)) == ["hanging: ends in its time"]
    assert given == [pytest.approx(2.0, abs=1.5)]


def test_what_earlier_parts_did_not_need_is_left_to_later_ones(session, monkeypatch):
    given = []
    monkeypatch.setattr(gpu_pack, "run_part", lambda part, session, seconds, usual_s: given.append((seconds, usual_s)))
    gpu_pack.run([part("quick", None, seconds=100), part("last", None, seconds=200)], session, 2 * DEADLINE_S)
    (quick, usual), (last, _) = given
    assert usual == 200  # twice the time for all is twice the time for each
    assert quick == pytest.approx(2 * DEADLINE_S - 400, abs=5)
    assert last == pytest.approx(2 * DEADLINE_S, abs=5)


def test_a_part_without_time_is_a_failed_check(session):
    gpu_pack.run_part(part("late", lambda _: None), session, 0.0, 10.0)
    assert list(failed(session)) == ["late: ends in its time"]


def test_a_part_whose_needs_are_not_met_is_passed_over_and_said(session):
    gpu_pack.run([part("cuda", lambda _: 1 / 0, needs=(CUDA,))], session, 60)
    assert failed(session) == {}
    assert summary(session)["parts"]["cuda"]["passed_over"] == "needs a CUDA device"


def test_an_alarm_ends_what_waits():
    with pytest.raises(OutOfTime), alarm(0.05):
        time.sleep(30)


# Who judges


@pytest.mark.parametrize(
    ("hardware", "loaded", "expected"),
    [
        (make_hardware(), False, Ground.CPU),
        (make_gpu(), False, Ground.GPU),
        (make_gpu(), True, Ground.STAND_IN),
        (make_hardware(), True, Ground.CPU),
    ],
)
def test_a_stand_in_is_known_by_the_module_that_loads_it(monkeypatch, hardware, loaded, expected):
    if loaded:
        monkeypatch.setitem(sys.modules, "fakecuda_loader", object())
    else:
        monkeypatch.delitem(sys.modules, "fakecuda_loader", raising=False)
    assert ground_of(hardware) is expected


@pytest.mark.parametrize(("on", "passes"), [(Ground.GPU, False), (Ground.STAND_IN, True), (Ground.CPU, True)])
def test_values_and_time_are_judged_on_a_real_gpu_alone(session, on, passes):
    session.report.ground = on
    session.report.check(Check("what holds anywhere", True, ""))
    session.report.check(Check("speed", False, "", Kind.VALUES_OR_TIME))
    assert session.report.passed is passes
    assert summary(session)["checks"][1]["judged"] is (on is Ground.GPU)


def test_a_check_that_holds_anywhere_is_judged_anywhere(session):
    session.report.ground = Ground.STAND_IN
    session.report.check(Check("a name", False, "why"))
    assert not session.report.passed


def test_a_check_is_on_disk_at_once(session):
    session.report.begin("a part")
    session.report.check(Check("a name", False, "why"))
    kept = {"part": "a part", "name": "a name", "passed": False, "detail": "why", "kind": "anywhere", "judged": True}
    assert summary(session)["checks"] == [kept]
    lines = (session.report.directory / "pack.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == {"check": kept}
    assert summary(session)["finished"] is False


# Trials of configurations


@pytest.mark.parametrize(
    ("outcome", "fields", "passed"),
    [
        (make_measurement(effects={"tf32": "tf32"}), {"seen": {"tf32": "^tf32$"}}, True),
        (make_measurement(effects={"tf32": "ieee"}), {"seen": {"tf32": "^tf32$"}}, False),
        (make_measurement(effects={}), {"seen": {"tf32": "^tf32$"}}, False),
        (make_measurement(), {"fails": True}, False),
        (make_failure(TrialStatus.INVALID), {}, False),
        (make_failure(TrialStatus.INVALID), {"fails": True}, True),
        (make_failure(TrialStatus.CRASHED), {"fails": True}, False),
    ],
)
def test_a_trial_has_to_come_out_as_its_row_says(outcome, fields, passed):
    row = Configuration("a name", {}, **fields)
    assert judged(row, make_result(outcome=outcome)).passed is passed


def test_the_overflowing_model_always_leaves_fp16_and_never_bf16(tmp_path):
    task = workload("overflowing-llama", detect("cpu"), tmp_path)
    for seed in range(3):
        torch.manual_seed(seed)
        model = build_model(task.model, task.task, dtype="bfloat16", device="cpu")
        tokens = torch.randint(512, (1, 16))
        with torch.no_grad():
            assert model(input_ids=tokens, labels=tokens).loss.isfinite()
            assert not model.half()(input_ids=tokens, labels=tokens).loss.isfinite()


# Estimates, and what is seen of devices


def estimate(*, allocated=1000 * MIB, device=1500 * MIB, rate=10.0):
    near = Interval(low=0.0, high=1e12)
    parts_of_memory = dict.fromkeys(
        ("weights_bytes", "gradients_bytes", "optimizer_state_bytes", "activations_bytes", "temporaries_bytes",
         "framework_bytes"), 0,
    )  # fmt: skip
    memory = MemoryBreakdown(
        **parts_of_memory,
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=allocated,
        device_peak_bytes=device,
        allocated_interval=near,
        reserved_interval=near,
        device_interval=near,
    )
    return CostEstimate(
        memory=memory,
        step_time_s=1.0,
        step_time_interval=near,
        samples_per_second=rate,
        samples_per_second_interval=near,
        flops_per_step=1.0,
        traced_by="meta",
    )


@pytest.mark.parametrize(
    ("fields", "bad", "kind"),
    [
        ({}, None, None),
        ({"allocated": 1060 * MIB}, "x: allocated as estimated", Kind.ANYWHERE),
        ({"device": 1800 * MIB}, "x: device memory as estimated", Kind.VALUES_OR_TIME),
        ({"rate": 21.0}, "x: speed as estimated", Kind.VALUES_OR_TIME),
        ({"rate": 4.9}, "x: speed as estimated", Kind.VALUES_OR_TIME),
    ],
)
def test_an_estimate_far_from_what_was_measured_fails(fields, bad, kind):
    seen = Memory(allocated_bytes=1000 * MIB, reserved_bytes=1100 * MIB, device_bytes=1500 * MIB)
    measured = make_measurement(10.0, memory=seen)
    checks = judged_estimate("x", estimate(**fields), measured)
    assert [(c.name, c.kind) for c in checks if not c.passed] == ([(bad, kind)] if bad else [])


@pytest.mark.parametrize(
    ("found", "uuid", "passed"),
    [
        ({"described": "GPU-1", "in_trials": ["1"]}, "GPU-1", True),
        ({"described": "GPU-2", "in_trials": ["1"]}, "GPU-1", False),
        ({"described": "GPU-1", "in_trials": ["1", "2"]}, "GPU-1", False),
        ({"error": "a traceback"}, "GPU-1", False),
        ({"auto": "cpu", "refused": "no such device"}, None, True),
        ({"auto": "cuda", "described": "GPU-1", "in_trials": ["1"]}, None, False),
        ({"error": "a traceback"}, None, False),
    ],
)
def test_autotune_and_its_trials_have_to_see_the_device_that_is_meant(found, uuid, passed):
    assert visible.judged("a form", found, uuid).passed is passed


# What trials came to


def story(status=TrialStatus.COMPLETED, *, peak=1000, observed=1000, part="s", **memory):
    figures = Memory(allocated_bytes=800 * MIB, reserved_bytes=900 * MIB, device_bytes=peak * MIB)
    return Story(
        part=part,
        number=0,
        status=status,
        budget_bytes=2000 * MIB,
        memory=figures.model_copy(update=memory),
        observed_bytes=observed * MIB,
        line="a trial",
    )


def failed_of(stories):
    return {check.name for check in check_trials(stories) if not check.passed}


def test_trials_as_they_should_be_pass_every_check():
    stories = [story(), story(TrialStatus.OUT_OF_MEMORY, peak=1990, observed=1990)]
    assert failed_of(stories) == set()
    assert ran_out_and_went_on("s", stories).passed


BAD = {
    "no trial crashed": story(TrialStatus.CRASHED),
    "no completed trial reports more than its budget": story(peak=2010, observed=2010),
    "allocated <= reserved <= device memory": story(reserved_bytes=700 * MIB),
    "no trial takes more than it reports, seen from outside": story(peak=1000, observed=1300),
    "the reported peak is seen from outside": story(peak=1300, observed=1000),
    "no trial takes more than its budget, seen from outside": story(
        TrialStatus.OUT_OF_MEMORY, peak=1990, observed=2300
    ),
}


@pytest.mark.parametrize(("name", "bad"), BAD.items(), ids=list(BAD))
def test_each_check_fails_for_its_own_reason(name, bad):
    assert failed_of([story(), bad]) == {name}


def test_an_evaluation_that_was_given_up_is_seen_from_outside_and_not_reported():
    checks = {"the reported peak is seen from outside"}
    assert failed_of([story(), story(peak=1000, observed=1900)._replace(gave_up=True)]) == set()
    assert failed_of([story(), story(peak=1900, observed=1000)._replace(gave_up=True)]) == checks


def test_what_is_seen_of_trials_that_compute_in_turn_is_of_none_of_them():
    alone, in_turn = (make_result(in_turn_with=numbers) for numbers in ((), (0, 1)))
    assert story_of("s", alone, observed_bytes=MIB).observed_bytes == MIB
    assert story_of("s", in_turn, observed_bytes=MIB).observed_bytes is None


def test_a_capped_search_in_which_nothing_ran_out_fails():
    out = story(TrialStatus.OUT_OF_MEMORY)
    assert not ran_out_and_went_on("s", [story(), out._replace(part="another")]).passed


def test_without_trials_nothing_is_known_to_be_right():
    assert "no trial crashed" in failed_of([])


def test_a_prefix_of_a_uuid_means_one_device_alone():
    one, other = "GPU-00000000-0000-0000-0000-000000000000", "GPU-00000000-0000-0000-0000-000000000010"
    assert visible.prefix_of(one, [one]) == one[:12]
    assert visible.prefix_of(one, [one, other]) == one[:-1]
    assert visible.prefix_of(one, [one, "GPU-1" + one[5:]]) == one[:12]
