"""`autotune export`: the answer as the files of launchers and libraries, from Python and from the command line."""

import json

import pytest
from factories import make_config, make_gpu, make_plan, make_result
from typer.testing import CliRunner

from autotune.answer import assemble
from autotune.cli import app
from autotune.config import Parallelism
from autotune.result import TuningResult
from autotune.rundir import ANSWER_FILE
from autotune.search.history import History
from autotune.trial import Purpose

SHARDED = make_config(4, parallelism=Parallelism(world_size=2, sharding="zero_2"))


@pytest.fixture
def result() -> TuningResult:
    """The answer of a search over two GPUs."""
    baseline = make_config(8, parallelism=Parallelism(world_size=2))
    history = History()
    trials = [make_result(baseline, purpose=Purpose.BASELINE), make_result(SHARDED, 20.0, number=1)]
    for trial in trials:
        history.add(trial)
    found = assemble(make_plan(hardware=make_gpu(cores=8), baseline=baseline), history, trials, {}, 1.0)
    assert found is not None
    assert found.best.config == SHARDED
    return found


@pytest.fixture
def export(result, tmp_path):
    """Return a function that exports the answer, which lies in a run directory."""
    result.save(tmp_path / ANSWER_FILE)
    return lambda *options: CliRunner().invoke(app, ["export", str(tmp_path), *options])


def test_the_result_knows_how_it_is_launched(result):
    assert result.launch_commands == (
        "OMP_NUM_THREADS=4 torchrun --standalone --nproc_per_node 2 train.py",
        "accelerate launch --config_file accelerate.yaml train.py",
    )


def test_all_files_are_written_beside_the_commands(export, result, tmp_path):
    done = export("--output", str(tmp_path / "out"), "--json")
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["launch"] == list(result.launch_commands)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "training_args.json", "accelerate.yaml", "deepspeed.json", "launch.txt",
    }  # fmt: skip
    assert json.loads((tmp_path / "out/training_args.json").read_text()) == result.arguments.training_arguments


def test_one_file_goes_where_it_is_wanted(export, result, tmp_path):
    assert export("--to", "deepspeed").stdout == result.file_text("deepspeed")
    assert export("--to", "deepspeed", "-o", str(tmp_path / "ds.json")).exit_code == 0
    assert (tmp_path / "ds.json").read_text() == result.file_text("deepspeed")


@pytest.mark.parametrize("options", [("--to", "fsdp"), ("--to", "deepsped"), (), ("-o", "/proc/nowhere")])
def test_what_can_not_be_exported_is_bad_input(export, options):
    assert export(*options).exit_code == 2
