"""`autotune export`: the answer as the files of launchers and libraries, from Python and from the command line."""

import json

import pytest
from exporting import answer_of
from factories import make_config, make_gpu, make_workload

from autotune.exports.launch_files import text_of
from autotune.storage.run_directory import ANSWER_FILE
from autotune.tuning_result import TuningResult
from autotune.values.config import Parallelism
from autotune.values.workload import OwnCode

SHARDED = make_config(4, parallelism=Parallelism(world_size=2, sharding="zero_2"))


@pytest.fixture
def result() -> TuningResult:
    """The answer of a search over two GPUs."""
    own = make_workload(fixed_arguments={"label_smoothing_factor": 0.25})
    return answer_of(SHARDED, hardware=make_gpu(cores=8), workload=own)


@pytest.fixture
def export(command, result, tmp_path):
    result.save(tmp_path / ANSWER_FILE)
    return lambda *options: command("export", tmp_path, *options)


def test_all_files_are_written_beside_the_commands(export, result, tmp_path):
    done = export("--output", tmp_path / "out", "--json")
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    launch = ("torchrun --standalone --nproc_per_node 2", "accelerate launch --config_file accelerate.yaml")
    assert told["launch"] == [*result.launch_commands] == [f"OMP_NUM_THREADS=4 {how} train.py" for how in launch]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "training_args.json", "accelerate.yaml", "deepspeed.json", "launch.txt", "train.py", "train_trl.py",
    }  # fmt: skip
    assert set(told["left_out"]) == {"accelerate-loop", "fsdp"}
    assert json.loads((tmp_path / "out/training_args.json").read_text()) == result.arguments.training_arguments


@pytest.mark.parametrize("target", ["training-args", "accelerate"])
def test_a_script_that_is_not_written_is_said_to_be_the_users(export, tmp_path, target):
    done = export("--to", target, "--output", tmp_path / "a.file")
    write = f"autotune export {tmp_path / ANSWER_FILE} --to python --output train.py"
    assert f"note:    train.py is a script of yours that takes these arguments, or that of: {write}" in done.stdout
    assert "note:" not in export("--to", "python", "--output", tmp_path / "train.py").stdout
    assert "note" not in json.loads(export("--output", tmp_path / "out", "--json").stdout)
    export("--to", "python", "--output", f"{tmp_path}/new/")
    assert (tmp_path / "new" / "train.py").is_file()
    (tmp_path / "new" / "train.py").write_text("the user's own")
    assert export("--to", "python", "--output", tmp_path / "new").exit_code == 2


def test_a_users_script_is_run_with_the_answer_where_it_lies(command, result, tmp_path):
    code = OwnCode(kind="script", shown="python run.py", command=("run.py",), directory="/")
    workload = result.workload.model_copy(update={"own_code": code})
    result.model_copy(update={"workload": workload}).save(tmp_path / ANSWER_FILE)
    for target in ("training-args", "all"):
        done = command("export", tmp_path, "--to", target, "--output", tmp_path / target)
        launches = [line for line in done.stdout.splitlines() if line.startswith(("launch:", "note:"))]
        ranks = "OMP_NUM_THREADS=4 torchrun --standalone --nproc_per_node 2 --no-python"
        assert launches == [f"launch:  {ranks} autotune script --apply {tmp_path / ANSWER_FILE} -- python run.py"]
    assert str(tmp_path / ANSWER_FILE) in (tmp_path / "all" / "launch.txt").read_text()
    assert not (tmp_path / "all/accelerate.yaml").exists()
    refused = command("export", tmp_path, "--to", "accelerate")
    assert refused.exit_code == 2
    assert "your own code trains by its TrainingArguments, not by this file" in refused.stderr


@pytest.mark.parametrize("target", ["training-args", "accelerate", "deepspeed"])
def test_a_file_goes_where_it_is_wanted_over_an_earlier_one_but_over_none_of_the_users(
    export, result, tmp_path, target
):
    file, own = tmp_path / "a.json", '{"bf16": {"enabled": true}, "use_cpu": false}'
    for _ in range(2):
        assert export("--to", target, "-o", file).stdout.startswith(f"written: {file}\n")
    assert file.read_text() == export("--to", target).stdout == text_of(target, result)
    piped = export("--to", target, "-o", "/dev/null")
    assert (piped.stdout, piped.stderr.splitlines()[0]) == ("", "written: /dev/null")
    file.write_text(own)
    refused = export("--to", target, "-o", file)
    assert (refused.exit_code, file.read_text()) == (2, own)
    assert "a.json is another file; remove it, or name another" in refused.stderr
    everything = export("--to", "all", "-o", tmp_path / "all")
    assert everything.stdout.count("written: ") == len(list((tmp_path / "all").iterdir()))
    (tmp_path / "all/launch.txt").write_text("my own")
    assert export("--to", "all", "-o", tmp_path / "all").exit_code == 2


@pytest.mark.parametrize(("target", "usual"), [("python", "train.py"), ("trl", "train_trl.py")])
def test_a_script_is_launched_and_calls_itself_by_the_name_it_was_given(export, tmp_path, target, usual):
    written = export("--to", target, "-o", tmp_path / "a tune.py")
    launches = [line for line in written.stdout.splitlines() if line.startswith("launch:")]
    assert launches
    assert all(line.endswith(f"'{tmp_path / 'a tune.py'}'") for line in launches)
    text = (tmp_path / "a tune.py").read_text()
    assert "--nproc_per_node 2 'a tune.py' --steps 100" in text
    assert usual not in text
    export("--to", target, "-o", tmp_path)
    assert f"--nproc_per_node 2 {usual} --steps 100" in (tmp_path / usual).read_text()
    assert export("--to", target, "-o", tmp_path / 'a"""b.py').exit_code == 0  # no docstring can hold that
    compile((tmp_path / 'a"""b.py').read_text(), "script", "exec")


def test_what_is_not_expressed_is_told_beside_the_file(export, tmp_path):
    answer_of(make_config(4, torch_empty_cache_steps=4)).save(tmp_path / ANSWER_FILE)
    line, printed = "not expressed: torch_empty_cache_steps=4", export("--to", "accelerate-loop")
    assert line in printed.stderr
    compile(printed.stdout, "script", "exec")
    assert line in export("--to", "accelerate-loop", "-o", tmp_path / "loop.py").stdout


@pytest.mark.parametrize(
    "options", ["--to fsdp", "--to deepsped", "", "-o /proc/nowhere", "--to accelerate-loop", "--to python --json"]
)
def test_what_can_not_be_exported_is_bad_input(export, options):
    assert export(*options.split()).exit_code == 2
