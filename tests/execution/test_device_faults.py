"""A device that fails: a trial's error that stays in its process, and a device that computes for nobody any more."""

import json
from pathlib import Path

import pytest
from running import printed

from autotune.errors import InfrastructureError, MachineError

pytestmark = pytest.mark.cuda

# In a process of its own, as the stand-in reads its variables once. The launcher's first child is the first process
# that uses the device, the first trial the second, and what tries the device after that the third.
TWO_TRIALS = """
import json, sys
from pathlib import Path
from benches import Bench
from autotune.errors import AutotuneError
from autotune.execution.places import sharing_notes
from autotune.training.resolve import resolve

bench = Bench(resolve(sys.argv[1]), Path(sys.argv[2]), device="cuda:0")
seen = {"takes turns": bench.runner.takes_turns, "notes": sharing_notes(["cuda:0"]), "trials": []}
with bench.runner:
    for _ in range(2):
        if len(sys.argv) > 3 and seen["trials"]:
            import torch
            held = torch.ones(1, device="cuda:0")
        try:
            seen["trials"].append(bench.run(limits={"memory_bytes": 4 << 30, "timeout_s": 20}).model_dump(mode="json"))
        except AutotuneError as error:
            seen["trials"].append([error.exit_code, str(error)])
    try:
        sharing_notes(["cuda:0"])
    except AutotuneError as error:
        seen["refusal"] = [error.exit_code, str(error)]
print(json.dumps(seen))
"""


def two_trials(model_directory: Path, run: Path, *arguments: str, **variables: str) -> dict:
    variables["FAKECUDA_STATE"] = str(run.with_name("devices"))
    return json.loads(printed("-c", TWO_TRIALS, model_directory, run, *arguments, timeout=300, **variables)[-1])


@pytest.mark.parametrize(
    ("fault", "first", "warning"),
    [
        ("700@300#2", "crashed", ""),  # an illegal address: the configuration's own, and the search goes on
        ("214@300#2", "completed", "it ran again: the device had failed"),  # a memory's, which the device gets over
        ("hang@300#2", "timed out", ""),
    ],
    ids=["illegal address", "uncorrectable memory", "hang"],
)
def test_an_error_that_stays_in_its_process_ends_one_trial_at_most(tiny_llama, tmp_path, fault, first, warning):
    one, other = two_trials(tiny_llama, tmp_path / "run", FAKECUDA_FAULT=fault)["trials"]
    assert [one["outcome"].get("status", "completed"), other["outcome"]["kind"]] == [first, "measurement"]
    assert warning in "; ".join(one["warnings"])
    assert not one["outcome"].get("device_failed")


def test_a_lost_device_ends_the_search_with_the_reason_and_keeps_what_was_measured(tiny_llama, tmp_path):
    run = tmp_path / "run"
    for code, told in two_trials(tiny_llama, run, FAKECUDA_FAULT="lost@300#2")["trials"]:
        assert code == InfrastructureError.exit_code
        assert told.startswith("cuda:0: doesn't compute")
        assert "GPU is lost" in told
        assert f"`autotune resume {run}` goes on" in told
    assert not list(run.rglob("result.json"))


def test_a_device_of_one_process_runs_trials_one_by_one_and_none_beside_another_process(tiny_llama, tmp_path):
    seen = two_trials(tiny_llama, tmp_path / "run", "hold it", FAKECUDA_EXCLUSIVE="1")
    assert not seen["takes turns"]
    assert "exclusive-process mode" in "".join(seen["notes"])
    first, (code, told) = seen["trials"]
    assert first["outcome"]["kind"] == "measurement"
    assert (code, "busy or unavailable" in told) == (InfrastructureError.exit_code, True)
    code, told = seen["refusal"]
    assert code == MachineError.exit_code
    assert "this very process has it" in told
