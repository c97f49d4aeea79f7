"""The key under which searches compare: what makes another one, and what doesn't; and what others read of a trial."""

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

from autotune.storage.recorded import key_of, read_recorded, without_places
from autotune.values.model import Task
from autotune.values.trial import Memory, Purpose, TrialStatus
from autotune.values.workload import LengthProfile, OwnCode, Recipe

LENGTHS = LengthProfile(samples=9, mean=20, minimum=1, median=20, p95=40, maximum=64)
VERSIONS = make_hardware().versions


def key(**fields) -> str:
    return key_of(make_problem(**{"facts": make_facts(architecture="abc"), **fields}))


WORKLOADS = {
    "model type": {"model": make_spec(model_type="gpt2")}, "code": {"model": make_spec(trust_remote_code=True)},
    "task": {"task": Task.SEQUENCE_CLASSIFICATION}, "sequence": {"sequence_length": 64}, "target": {"target_length": 8},
    "batch": {"global_batch_size": 32}, "free batch": {"global_batch_size": None},
    "data": {"dataset": "texts.jsonl", "lengths": LENGTHS}, "arguments": {"fixed_arguments": {"max_grad_norm": 0.0}},
}  # fmt: skip
CHANGES = {
    **{name: ({"workload": make_workload(**fields)}, False) for name, fields in WORKLOADS.items()},
    "architecture": ({"facts": make_facts(architecture="abd")}, False),
    "size": ({"facts": make_facts(architecture="abc", parameters=2)}, False),
    "device": ({"hardware": make_hardware(name="another CPU")}, False),
    "cores": ({"hardware": make_hardware(cores=8)}, False),
    "memory": ({"hardware": make_hardware(memory_bytes=1 << 30)}, False),
    "torch": ({"hardware": make_hardware(versions={**VERSIONS, "torch": "2.14.0"})}, False),
    "what doesn't train": ({"hardware": make_hardware(versions={**VERSIONS, "optuna": "6.0.0"})}, True),
    "what is free now": ({"hardware": make_hardware(free_bytes=1, peers=("cuda:2",))}, True),
}
ELSEWHERE = {"name": "another", "reference": "./another", "source": "directory", "path": "/another"}
NOT_STEPS = {
    "name and path": {"model": make_spec(**ELSEWHERE)},
    "revision": {"model": make_spec(revision="v2")},
    "how its figures were written": {"model": make_spec(config={"hidden_size": 64})},
    "seed": {"seed": 7},
    "learning rate": {"fixed_arguments": {"learning_rate": 1e-3, "seed": 3}},
}
CHANGES |= {name: ({"workload": make_workload(**fields)}, True) for name, fields in NOT_STEPS.items()}


@pytest.mark.parametrize(("change", "is_same"), CHANGES.values(), ids=CHANGES)
def test_another_step_architecture_device_or_version_has_another_key(change, is_same):
    assert (key(**change) == key()) == is_same


def test_code_of_its_own_is_known_by_revision_an_unknown_architecture_by_its_figures_and_no_device_by_its_number():
    own = [make_workload(model=make_spec(trust_remote_code=True, revision=r)) for r in ("v1", "v2")]
    assert key(workload=own[0]) != key(workload=own[1])
    small, large = (make_workload(model=make_spec(config={"hidden_size": size})) for size in (64, 128))
    assert key(workload=small, facts=make_facts()) != key(workload=large, facts=make_facts())
    assert key(hardware=make_gpu()) == key(hardware=make_gpu(device="cuda:3"))


def test_others_read_the_whole_outcome_but_not_where_anything_lies():
    secret = "/home/ann"
    workload = make_workload(
        model=make_spec(reference=f"{secret}/model", path=f"{secret}/model", config={"_name_or_path": secret}),
        dataset=f"{secret}/texts.jsonl",
        fixed_arguments={"output_dir": secret},
        own_code=OwnCode(kind="script", shown=secret, command=(secret,), directory=secret),
        recipe=Recipe(name="grpo", prompt_length=8, completion_length=8, reward="mine:reward", directory=secret),
    )
    measured = make_measurement(12.0, memory=Memory(resident_bytes=5), loss=math.nan)
    failure = make_failure(TrialStatus.OUT_OF_MEMORY)
    for outcome in (measured, failure):
        result = make_result(outcome=outcome, workload=workload)
        result = result.model_copy(update={"warnings": (secret,), "place": secret})
        text = without_places(result).model_dump_json()
        assert secret not in text
        kept = read_recorded(text)
        assert (kept.request.config, kept.status) == (result.request.config, result.status)
    assert without_places(make_result(outcome=measured)).outcome == measured


def test_the_best_of_a_search_is_its_answer_as_the_finals_measured_it():
    best, lucky = make_config(16), make_config(4)
    searched = [recorded_trial(best, 20.0), recorded_trial(lucky, 80.0)]
    finals = [recorded_trial(best, rate, purpose=Purpose.FINAL) for rate in (15.0, 15.0)]
    assert recorded_search(*searched).best_samples_per_second == 80.0, "no answer yet"
    answered = {"best_config_id": best.config_id}
    assert recorded_search(*searched, **answered).best_samples_per_second == 20.0
    assert recorded_search(*searched, *finals, **answered).best_samples_per_second == pytest.approx(15.0)
    nothing = recorded_search(recorded_trial(outcome=OUT_OF_MEMORY, purpose=Purpose.BASELINE))
    assert nothing.best_samples_per_second is None
