"""The key under which searches compare: what makes another one, and what doesn't."""

import math

import pytest
from factories import (
    OUT_OF_MEMORY,
    make_config,
    make_facts,
    make_failure,
    make_gpu,
    make_hardware,
    make_measurement,
    make_problem,
    make_result,
    make_spec,
    make_workload,
)
from recorded_searches import recorded_search, recorded_trial

from autotune.storage.recorded import RecordedTrial, key_of
from autotune.values.model import Task
from autotune.values.trial import Memory, Purpose, TrialStatus
from autotune.values.workload import LengthProfile

LENGTHS = LengthProfile(samples=9, mean=20, minimum=1, median=20, p95=40, maximum=64)


def key(workload=None, facts=None, hardware=None) -> str:
    fields = {"workload": workload, "facts": facts or make_facts(architecture="abc"), "hardware": hardware}
    return key_of(make_problem(**{name: value for name, value in fields.items() if value is not None})).short


USUAL = key()


VERSIONS = make_hardware().versions
ALIKE = {
    "name and path": {
        "workload": make_workload(
            model=make_spec(name="another", reference="./another", source="directory", path="/another")
        )
    },
    "revision": {"workload": make_workload(model=make_spec(revision="v2"))},
    "how its figures were written": {"workload": make_workload(model=make_spec(config={"hidden_size": 64}))},
    "seed": {"workload": make_workload(seed=7)},
    "learning rate": {"workload": make_workload(fixed_arguments={"learning_rate": 1e-3, "seed": 3})},
    "what doesn't train": {"hardware": make_hardware(versions={**VERSIONS, "optuna": "6.0.0"})},
}


@pytest.mark.parametrize("change", ALIKE.values(), ids=ALIKE)
def test_the_same_step_of_the_same_architecture_has_the_same_key(change):
    assert key(**change) == USUAL


WORKLOADS = {
    "model type": {"model": make_spec(model_type="gpt2")},
    "code": {"model": make_spec(trust_remote_code=True)},
    "task": {"task": Task.SEQUENCE_CLASSIFICATION},
    "sequence": {"sequence_length": 64},
    "target": {"target_length": 8},
    "batch": {"global_batch_size": 32},
    "free batch": {"global_batch_size": None},
    "data": {"dataset": "texts.jsonl", "lengths": LENGTHS},
    "arguments": {"fixed_arguments": {"max_grad_norm": 0.0}},
}
OTHERS = {
    **{name: {"workload": make_workload(**fields)} for name, fields in WORKLOADS.items()},
    "architecture": {"facts": make_facts(architecture="abd")},
    "size": {"facts": make_facts(architecture="abc", parameters=2)},
    "device": {"hardware": make_hardware(name="another CPU")},
    "cores": {"hardware": make_hardware(cores=8)},
    "memory": {"hardware": make_hardware(memory_bytes=1 << 30)},
    "torch": {"hardware": make_hardware(versions={**VERSIONS, "torch": "2.14.0"})},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_another_step_architecture_device_or_version_has_another_key(change):
    assert key(**change) != USUAL


def test_without_a_digest_of_the_architecture_the_figures_as_written_count():
    facts = make_facts()
    small, large = (make_workload(model=make_spec(config={"hidden_size": size})) for size in (64, 128))
    assert key(small, facts) == key(small, facts) != key(large, facts)


def test_code_of_its_own_is_known_by_name_and_revision():
    own = [make_workload(model=make_spec(trust_remote_code=True, revision=r)) for r in ("v1", "v2")]
    assert key(own[0]) != key(own[1])


def test_what_is_free_now_and_the_number_of_the_device_make_no_other_key():
    gpu = make_gpu()
    assert key(hardware=gpu) == key(hardware=make_gpu(free_bytes=1, device="cuda:3"))


def test_a_trial_is_recorded_with_its_whole_outcome_but_the_log():
    measured = make_measurement(12.0, memory=Memory(resident_bytes=5), loss=math.nan)
    kept = RecordedTrial.of(make_result(outcome=measured), "2026-11-20T12:00:00+00:00")
    assert kept.samples_per_second == 12.0
    assert kept.outcome["step_times_s"] == list(measured.step_times_s)
    failure = make_failure(TrialStatus.OUT_OF_MEMORY, log_tail="many lines")
    kept = RecordedTrial.of(make_result(outcome=failure), "2026-11-20T12:00:00+00:00")
    assert (kept.samples_per_second, kept.outcome["status"]) == (None, "out of memory")
    assert "log_tail" not in kept.outcome


def test_the_best_of_a_search_is_its_answer_as_the_finals_measured_it():
    best, lucky = make_config(16), make_config(4)
    searched = [recorded_trial(best, 20.0), recorded_trial(lucky, 80.0)]
    finals = [recorded_trial(best, rate, purpose=Purpose.FINAL) for rate in (15.0, 15.0)]
    assert recorded_search(*searched).best_samples_per_second == 80.0, "no answer yet"
    answered = {"best_config_id": best.config_id}
    assert recorded_search(*searched, **answered).best_samples_per_second == 20.0
    assert recorded_search(*searched, *finals, **answered).best_samples_per_second == pytest.approx(15.0)
    failed = recorded_trial(best, OUT_OF_MEMORY)
    assert (
        recorded_search(recorded_trial(outcome=OUT_OF_MEMORY, purpose=Purpose.BASELINE), failed).best_samples_per_second
        is None
    )
