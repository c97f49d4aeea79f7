"""A container image of an answer: its versions, and files that other tools accept."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from exporting import CPU, answer_of, answer_with, drafted
from factories import make_config, make_spec, make_workload
from packaging.requirements import Requirement

from autotune.exports import targets

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.filterwarnings("default")  # the imports of others


def test_compose_files_are_what_the_specification_allows():
    compose_spec = pytest.importorskip("compose_spec")
    for text in (drafted("dockerfile").files["compose.yaml"], (ROOT / "compose.yaml").read_text()):
        compose_spec.ComposeSpecification.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize("compiled", [True, False])
def test_dockerfiles_have_nothing_that_hadolint_minds(compiled, tmp_path):
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    backend = "inductor" if compiled else None
    exported = answer_with(torch_compile_backend=backend).export("dockerfile", tmp_path).paths[0]
    done = subprocess.run([hadolint, str(exported), str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_has_all_that_autotune_imports_in_versions_that_it_takes():
    lines = (ROOT / "docker/constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement


def text(draft):
    return "".join(draft.files.values())


def test_an_image_has_the_versions_that_measured():
    files = drafted("dockerfile", adapter={"kind": "lora"}, attn_implementation="flash_attention_2").files
    assert "torch==2.13.0\ntransformers==5.23.0\n" in files["requirements.txt"]
    assert "flash-attn==2.8.0\n" in files["requirements.txt"]
    assert 'ENTRYPOINT ["python", "train.py"]' in files["Dockerfile"]
    assert "g++" not in files["Dockerfile"]
    service = yaml.safe_load(files["compose.yaml"])["services"]["train"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["count"], device["driver"]) == (1, "nvidia")
    assert "train.py" in files


def test_an_image_of_ranks_is_started_by_torchrun():
    files = drafted("dockerfile", parallelism={"world_size": 2}, torch_compile_backend="inductor").files
    entry = files["Dockerfile"].splitlines()[-1].removeprefix("ENTRYPOINT ")
    assert json.loads(entry) == ["torchrun", "--standalone", "--nproc_per_node", "2", "train.py"]
    assert "ENV OMP_NUM_THREADS=4\n" in files["Dockerfile"]
    assert "g++" in files["Dockerfile"]
    assert yaml.safe_load(files["compose.yaml"])["services"]["train"]["ipc"] == "host"


@pytest.mark.parametrize("name", ["my model", "a$HOME"])
def test_a_models_directory_is_mounted_where_the_script_looks_for_it(name, tmp_path):
    folder = tmp_path / name
    spec = make_spec(name=name, source="directory", path=str(folder))
    draft = targets.draft(answer_of(make_config(4), workload=make_workload(model=spec)), "dockerfile")
    service = yaml.safe_load(draft.files["compose.yaml"])["services"]["train"]
    (mount,) = [volume for volume in service["volumes"] if isinstance(volume, dict)]
    seen = {key: str(value).replace("$$", "$") for key, value in mount.items()}
    assert seen == {"type": "bind", "source": str(folder), "target": str(folder), "read_only": "True"}
    assert f'MODEL = "{folder}"' in draft.files["train.py"]
    assert shlex.join(["--volume", f"{folder}:{folder}:ro"]) in draft.files["Dockerfile"]
    compose_spec = pytest.importorskip("compose_spec")
    compose_spec.ComposeSpecification.model_validate(yaml.safe_load(draft.files["compose.yaml"]))


def test_a_model_of_the_hub_is_not_mounted():
    files = drafted("dockerfile").files
    assert "bind" not in files["compose.yaml"]
    assert "--volume" not in files["Dockerfile"]


def test_an_image_for_a_cpu_asks_for_no_gpu():
    versions = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
    files = drafted("dockerfile", hardware=CPU.model_copy(update={"versions": versions})).files
    assert "deploy" not in yaml.safe_load(files["compose.yaml"])["services"]["train"]
    assert "--extra-index-url https://download.pytorch.org/whl/cpu\ntorch==2.13.0+cpu\n" in files["requirements.txt"]
