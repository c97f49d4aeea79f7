"""The built wheel and sdist: what is in them, and that the wheel's command runs from another directory."""

import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from test_architecture import imported

from autotune import __version__

ROOT = Path(__file__).parents[1]

# Imports whose package is called otherwise, that come with another dependency, or that are only looked for.
OTHERWISE = {"pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
BROUGHT_BY_OTHERS = {
    "tokenizers": "transformers", "huggingface_hub": "transformers", "markupsafe": "jinja2", "pyarrow": "datasets",
    "triton": "torch", "safetensors": "transformers",
}  # fmt: skip
NOT_REQUIRED = {"liger_kernel", "torchao"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_what_is_imported_is_declared():
    extras = project()["optional-dependencies"].values()
    requirements = [*project()["dependencies"], *(r for extra in extras for r in extra)]
    declared = {re.match(r"[\w.-]+", r)[0].lower() for r in requirements}
    names = {name.split(".")[0] for path in (ROOT / "autotune").rglob("*.py") for name in imported(path)}
    for name in sorted(names - sys.stdlib_module_names - {"autotune"} - NOT_REQUIRED):
        package = OTHERWISE.get(name) or BROUGHT_BY_OTHERS.get(name) or name.replace("_", "-")
        assert package in declared, f"{name} is imported, and pyproject.toml names no {package}"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and with the wheel that was built from it: what the sdist lacks, the wheel lacks."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """Return a function that runs the command of the installed wheel, in a directory that holds nothing else.

    The libraries are those of this Python, by a path that ends what is installed there from counting as autotune.
    """
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home / "venv", with_pip=True)
    python = home / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    (packages,) = (home / "venv").glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    alone = {"PATH": "/usr/bin:/bin", "HOME": str(home), "COLUMNS": "200", "AUTOTUNE_HOME": str(home / "kept")}

    def run(*arguments: str) -> str:
        called = [home / "venv" / "bin" / "autotune", *arguments]
        done = subprocess.run(called, cwd=elsewhere, capture_output=True, text=True, timeout=200, env=alone)
        assert done.returncode == 0, done.stderr
        return done.stdout

    asked = [python, "-c", "import autotune; print(autotune.__file__)"]
    told = subprocess.run(asked, cwd=elsewhere, capture_output=True, env=alone)
    assert Path(told.stdout.decode().strip()).parent == packages / "autotune"
    return run


def package_files() -> set[str]:
    """What git knows of the package, or would if it were added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "autotune"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_data_and_says_what_the_project_says(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert package_files() <= names
    assert {f"autotune/search_spaces/{path.name}" for path in (ROOT / "search_spaces").glob("*.yaml")} <= names
    assert {"autotune/py.typed", "autotune/values/catalogue/gpus.json"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"autotune", f"autotune_train-{__version__}.dist-info"}
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"autotune_train-{__version__}.dist-info/METADATA").decode()
    assert f"Requires-Python: {project()['requires-python']}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    extras = {line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")}
    assert extras == set(project()["optional-dependencies"])
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert len(required) == len(project()["dependencies"])


@pytest.mark.slow
def test_the_sdist_holds_what_tests_and_documents_need(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "search_spaces/default.yaml"} <= names
    assert {"tests/conftest.py", "examples/README.md", "docs/how-it-works.md", "benchmarks/README.md"} <= names


@pytest.mark.slow
def test_the_installed_command_tells_its_version_finds_its_search_spaces_and_estimates(command):
    assert command("--version").splitlines()[0] == f"autotune {__version__}"
    listed = {space["name"] for space in json.loads(command("spaces", "--json"))}
    assert {path.stem for path in (ROOT / "search_spaces").glob("*.yaml")} == listed
    assert "default" in command("spaces")
    text = command("estimate", "--model", "t5-small", "--gpu", "a100-80gb", "--fix", "micro-batch=8")
    assert text.startswith("google-t5/t5-small (seq2seq-lm), global batch 64, sequence 512 + 512, on a100-80gb")
    assert "fits 79.15 GiB" in text
