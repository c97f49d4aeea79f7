"""The recipes for clusters: they parse, and call `autotune` as it can be called."""

import re
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from code_blocks import autotune_calls

from autotune.cli.main import app
from autotune.errors import InputError, MachineError, NothingFitsError

EXAMPLES = Path(__file__).parents[1] / "examples"
BATCH = EXAMPLES / "slurm" / "find.sbatch"
MACHINES = EXAMPLES / "slurm" / "machines.sbatch"
MANIFEST = EXAMPLES / "kubernetes" / "find.yaml"
RAY_JOB = yaml.safe_load((EXAMPLES / "kubernetes" / "rayjob.yaml").read_text())["spec"]


def manifests() -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def pod() -> dict:
    return manifests()["Job"]["spec"]["template"]["spec"]


def script() -> str:
    """What the pod runs."""
    (text,) = pod()["containers"][0]["args"]
    return text


@pytest.mark.parametrize(
    "text",
    [BATCH.read_text, MACHINES.read_text, script, lambda: RAY_JOB["entrypoint"]],
    ids=["find.sbatch", "machines.sbatch", "find.yaml", "rayjob.yaml"],
)
def test_the_shell_can_read_it_the_options_exist_and_what_is_needed_is_given(text):
    checked = subprocess.run(["bash", "-n"], input=text(), capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    known = typer.main.get_command(app).commands
    called = autotune_calls(text())
    assert [words[0] for words in called] in (["resume", "find"], ["find"])
    for name, *words in called:
        parameters = known[name].get_params(known[name].make_context(name, [], resilient_parsing=True))
        options = {option for parameter in parameters for option in parameter.opts if option.startswith("--")}
        given = {word for word in words if word.startswith("--")}
        assert given <= options
        assert given >= {p.opts[0] for p in parameters if p.required and p.param_type_name == "option"}


@pytest.mark.parametrize("batch", [BATCH, MACHINES], ids=lambda path: path.name)
def test_every_option_of_slurm_comes_before_the_first_command(batch):
    """sbatch reads no further."""
    lines = batch.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    options = [n for n, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert options
    assert max(options) < first
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[n]) for n in options)


def test_every_task_of_the_array_has_a_model():
    text = BATCH.read_text()
    last = int(re.search(r"--array=0-(\d+)", text)[1])
    assert len(re.search(r"MODELS=\(\n(.*?)\)", text, re.DOTALL)[1].split()) == last + 1


def run(batch: Path, environment: dict[str, str]) -> str:
    return subprocess.run(["bash", batch], env=environment, capture_output=True, text=True, check=True).stdout


def test_a_batch_job_goes_on_where_it_was(tmp_path):
    """The script itself runs, with a stand-in for srun that says what it was to run."""
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "srun"
    stand_in.write_text('#!/bin/sh\necho "$AUTOTUNE_RECORD: $*"\n')
    stand_in.chmod(0o755)
    (tmp_path / ".config" / "autotune").mkdir(parents=True)
    (tmp_path / ".config" / "autotune" / "record-url").write_text("sqlite:////data/record.db\n")
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "7"}
    environment = {"PATH": f"{stand_in.parent}:/usr/bin:/bin", "HOME": str(tmp_path), **slurm}
    assert run(BATCH, environment).startswith("sqlite:////data/record.db: autotune find --model google-t5/t5-3b")
    (directory := tmp_path / "runs" / "google-t5-t5-3b-7").mkdir(parents=True)
    (directory / "search.json").touch()
    assert run(BATCH, environment).startswith(f"sqlite:////data/record.db: autotune resume {directory}")


def test_a_batch_job_of_several_nodes_goes_on_where_it_was(tmp_path):
    """The script itself runs, with stand-ins that say what they were to run."""
    for name, says in {"srun": 'echo "$RAY_ADDRESS: $*"', "scontrol": "echo n1; sleep 0.1; echo n2"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SUBMIT_DIR": str(tmp_path), "JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "NNODES": "2", "GPUS_PER_NODE": "8"}
    own = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | {f"SLURM_{name}": value for name, value in slurm.items()}
    begun = "n1:6379: ray symmetric-run --address n1:6379 --min-nodes 2 -- autotune "
    assert run(MACHINES, own).startswith(f"{begun}find --model meta-llama/Meta-Llama-3-8B --devices 16 --nodes 2 ")
    (directory := tmp_path / "runs" / "meta-llama-Meta-Llama-3-8B-7").mkdir(parents=True)
    (directory / "search.json").touch()
    assert run(MACHINES, own) == f"{begun}resume {directory}\n"


def test_the_workers_of_a_ray_job_have_the_gpus_of_its_search():
    (workers,) = RAY_JOB["rayClusterSpec"]["workerGroupSpecs"]
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--devices {workers['replicas'] * gpus} --nodes {workers['replicas']}" in RAY_JOB["entrypoint"]


def test_what_another_pod_would_find_again_is_not_tried_again():
    rule = manifests()["Job"]["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["values"] == [e.exit_code for e in (InputError, MachineError, NothingFitsError)]
    assert pod()["restartPolicy"] == "Never"  # a podFailurePolicy needs that
