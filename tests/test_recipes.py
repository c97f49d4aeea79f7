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
MANIFEST = EXAMPLES / "kubernetes" / "find.yaml"


def manifests() -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def pod() -> dict:
    return manifests()["Job"]["spec"]["template"]["spec"]


def script() -> str:
    """What the pod runs."""
    (text,) = pod()["containers"][0]["args"]
    return text


@pytest.mark.parametrize("text", [BATCH.read_text, script], ids=["slurm", "kubernetes"])
def test_the_shell_can_read_it_the_options_exist_and_what_is_needed_is_given(text):
    checked = subprocess.run(["bash", "-n"], input=text(), capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    known = typer.main.get_command(app).commands
    called = autotune_calls(text())
    assert [words[0] for words in called] == ["resume", "find"]
    for name, *words in called:
        parameters = known[name].get_params(known[name].make_context(name, [], resilient_parsing=True))
        options = {option for parameter in parameters for option in parameter.opts if option.startswith("--")}
        given = {word for word in words if word.startswith("--")}
        assert given <= options
        assert given >= {p.opts[0] for p in parameters if p.required and p.param_type_name == "option"}


def test_every_option_of_slurm_comes_before_the_first_command():
    """sbatch reads no further."""
    lines = BATCH.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    options = [n for n, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert options
    assert max(options) < first
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[n]) for n in options)


def test_every_task_of_the_array_has_a_model():
    text = BATCH.read_text()
    last = int(re.search(r"--array=0-(\d+)", text)[1])
    models = re.search(r"MODELS=\(\n(.*?)\)", text, re.DOTALL)[1].split()
    assert len(models) == last + 1


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

    def run() -> str:
        return subprocess.run(["bash", BATCH], env=environment, capture_output=True, text=True, check=True).stdout

    assert run().startswith("sqlite:////data/record.db: autotune find --model google-t5/t5-3b")
    (tmp_path / "runs" / "google-t5-t5-3b-7").mkdir(parents=True)
    (tmp_path / "runs" / "google-t5-t5-3b-7" / "search.json").touch()
    assert run().startswith(f"sqlite:////data/record.db: autotune resume {tmp_path}/runs/google-t5-t5-3b-7")


def test_what_another_pod_would_find_again_is_not_tried_again():
    rule = manifests()["Job"]["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["values"] == [e.exit_code for e in (InputError, MachineError, NothingFitsError)]
    assert pod()["restartPolicy"] == "Never"  # a podFailurePolicy needs that
