"""The doctor measures the rates of a device when asked to, and says whether any are kept."""

import json

import pytest
from factories import make_gpu
from typer.testing import CliRunner

from autotune import doctor
from autotune.cli.main import app
from autotune.cost import calibrate

LIBRARIES = dict.fromkeys(("bitsandbytes", "peft", "datasets", "flash_attn", "liger_kernel", "triton"), "")


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty home, and a machine that is examined and measured in no time."""
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_libraries", lambda: {**LIBRARIES, "cuda_build": None})
    monkeypatch.setattr(calibrate, "CPU_SIZES", calibrate.TINY_SIZES)
    return tmp_path


def examine(*arguments):
    return CliRunner().invoke(app, ["doctor", "--device", "cpu", *arguments], env={"COLUMNS": "200"})


def test_without_measured_rates_it_says_how_to_get_them(home):
    report = json.loads(examine("--json").stdout)
    (finding,) = [f for f in report["findings"] if f["name"] == "measured rates"]
    assert not finding["available"]
    assert "--calibrate" in finding["detail"]
    assert report["rates"] is None
    assert report["table_rates"]["source"] == "table"
    assert not list(home.iterdir())


@pytest.mark.parametrize("has_cc", [True, False])
def test_triton_without_a_c_compiler_is_told_of_all_that_needs_it(monkeypatch, home, has_cc):
    monkeypatch.setattr(doctor, "detect", lambda device: make_gpu(has_cc=has_cc))
    found = {f.name: f for f in doctor.examine("cuda:0").findings}
    for name in ("torch.compile", "Liger kernels"):
        assert found[name].available is has_cc
        assert ("C compiler" in found[name].detail) is not has_cc


@pytest.mark.slow
def test_calibrating_keeps_the_rates_and_shows_them_beside_the_tables(home):
    shown = examine("--calibrate")
    assert shown.exit_code == 0
    (file,) = home.rglob("*.json")
    assert str(file) in shown.stdout.replace("\n", "")
    assert "by the table" in shown.stdout
    report = json.loads(examine("--json").stdout)  # afterwards, without the option
    assert report["rates"] == json.loads(file.read_text())
    assert report["rates"]["source"] == "measured"
    assert report["rates_file"] == str(file)
    (finding,) = [f for f in report["findings"] if f["name"] == "measured rates"]
    assert finding["available"]


def test_a_home_that_can_not_be_written_fails_before_anything_is_measured(home, monkeypatch):
    (home / "file").touch()
    monkeypatch.setenv("AUTOTUNE_HOME", str(home / "file"))
    monkeypatch.setattr(doctor, "calibrate", lambda hardware: pytest.fail("measured in vain"))
    failed = examine("--calibrate", "--json")
    assert failed.exit_code == 2
    assert "can't be written" in json.loads(failed.stdout)["error"]["message"]


@pytest.mark.slow
def test_a_broken_file_does_not_stop_the_doctor(home):
    examine("--calibrate")
    (file,) = home.rglob("*.json")
    file.write_text("{")
    report = json.loads(examine("--json").stdout)
    assert report["rates"] is None
