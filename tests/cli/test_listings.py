"""Commands that list: models, GPUs, search spaces, the doctor's findings, installed versions."""

import importlib.metadata
import json
import platform
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from autotune import __version__
from autotune.cli.main import app


def test_models_can_be_searched_and_have_sources(command):
    models = json.loads(command("models", "--json").stdout)
    assert len(models) >= 60
    assert all(m["source"].startswith("https://") for m in models)
    shown = command("models", "t5-small").stdout
    assert "google-t5/t5-small" in shown
    assert "gpt2" not in shown


def test_names_alone_are_for_other_programs():
    for command, name in (("models", "t5-small"), ("gpus", "a100-80gb"), ("spaces", "qlora")):
        names = CliRunner().invoke(app, [command, "--quiet"]).stdout.splitlines()
        assert name in names
        assert all(" " not in name for name in names)


def test_versions_are_told_of_what_is_installed_and_what_is_not():
    text = CliRunner().invoke(app, ["--version"]).stdout
    assert text.splitlines()[0] == f"autotune {__version__}"
    assert f"torch {importlib.metadata.version('torch')}" in text.splitlines()
    told = json.loads(CliRunner().invoke(app, ["--version", "--json"]).stdout)
    assert told["autotune"] == __version__
    assert told["python"] == platform.python_version()
    assert told["packages"]["optuna"] == importlib.metadata.version("optuna")
    assert not set(told["packages"]) & set(told["missing"])


def test_a_folder_of_a_packages_name_is_not_the_package(monkeypatch, tmp_path):
    (tmp_path / "of_that_name").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("autotune.cli.listings._ALSO_VERSIONS_OF", ("of-that-name",))
    assert "of-that-name" in json.loads(CliRunner().invoke(app, ["--version", "--json"]).stdout)["missing"]


def test_versions_load_none_of_what_they_tell_of():
    code = (
        "import sys; sys.argv = ['autotune', '--version']\n"
        "from autotune.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'optuna', 'peft', 'bitsandbytes') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_spaces_say_how_many_of_their_points_are_legal_here(autotune):
    points = {s["name"]: s["legal_points_here"] for s in json.loads(autotune("spaces", "--json").stdout)}
    assert points.keys() >= {"adapters", "cpu", "default", "exact", "full", "lora", "moe", "qlora", "speech", "vision"}
    assert points["cpu"] > 100


@pytest.mark.slow
def test_doctor_tells_what_a_cpu_cannot_do(autotune):
    report = json.loads(autotune("doctor", "--device", "cpu", "--json").stdout)
    findings = {f["name"]: f for f in report["findings"]}
    assert not findings["fp16"]["available"]
    assert findings["memory budget"]["available"]
    assert findings["LoRA"]["available"]
