"""Where lasting things live, and what is stored there of devices and models."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from factories import make_hardware, make_spec, make_workload
from profiles import make_family, make_profile
from running import run_at_once

from autotune.cost.corrections import Observation
from autotune.errors import InputError
from autotune.storage.home import (
    _MOST_OBSERVATIONS,
    Observations,
    add_observations,
    home,
    read_observations,
    read_timings,
    read_trace,
    writable,
    write_trace,
)

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.mark.parametrize(
    ("variable", "data_home", "expected"),
    [
        ("/mine", "/data", "/mine"), ("~/mine", None, "{home}/mine"), (None, None, "{home}/.local/share/autotune"),
        (None, "", "{home}/.local/share/autotune"), (None, "relative", "{home}/.local/share/autotune"),
        (None, "/data", "/data/autotune"),
    ],
)  # fmt: skip
def test_the_home_is_where_the_variable_says_and_otherwise_the_xdg_specification(
    monkeypatch, tmp_path, variable, data_home, expected
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in (("AUTOTUNE_HOME", variable), ("XDG_DATA_HOME", data_home)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert home() == Path(expected.format(home=tmp_path))


def test_a_home_that_can_not_be_written_is_one_line_and_stores_nothing(own_home, caplog):
    own_home.touch()
    with pytest.raises(InputError, match=r"traces: can't be written: .*AUTOTUNE_HOME") as caught:
        writable("traces")
    assert "\n" not in str(caught.value)
    write_trace(make_workload(), 10, make_profile())
    assert read_trace(make_workload(), 10, make_profile().family) is None
    assert caplog.records == []
    add_observations(make_hardware(), "llama", [observation()])
    assert "not stored" in caplog.text


def test_a_home_is_private(own_home):
    writable("traces")
    assert own_home.stat().st_mode & 0o777 == 0o700


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("AUTOTUNE_HOME")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(InputError, match="set AUTOTUNE_HOME"):
        home()


def observation(*, key: str = "a", ratio: float = 1.0) -> Observation:
    return Observation(key=key, memory_features={}, memory={"device": ratio}, time_features={}, log_time=None)


def test_of_a_configuration_the_latest_is_stored_and_of_all_the_latest():
    add_observations(make_hardware(), "llama", [observation(ratio=1.0), observation(key="b")])
    add_observations(make_hardware(), "llama", [observation(ratio=2.0)])
    found = {o.key: o.memory["device"] for o in read_observations(make_hardware(), "llama")}
    assert found == {"a": 2.0, "b": 1.0}
    many = [observation(key=str(i)) for i in range(_MOST_OBSERVATIONS + 10)]
    add_observations(make_hardware(), "llama", many)
    assert read_observations(make_hardware(), "llama") == tuple(many[10:])


ENDLESS = Observations(observations=(observation(ratio=1.5),)).model_dump_json().replace("1.5", "NaN")


@pytest.mark.parametrize("content", ["", "{", '{"observations": [1]}', '{"somebody": "else"}', ENDLESS])
def test_broken_observations_are_ignored_with_a_warning_and_replaced(own_home, caplog, content):
    add_observations(make_hardware(), "llama", [observation()])
    (path,) = own_home.glob("corrections/*/llama.json")
    path.write_text(content)
    assert read_observations(make_hardware(), "llama") == ()
    assert f"{path} is ignored" in caplog.text
    add_observations(make_hardware(), "llama", [observation(key="new")])
    assert [o.key for o in read_observations(make_hardware(), "llama")] == ["new"]


@pytest.fixture
def traced(own_home):
    """A stored trace, and its file."""
    profile = make_profile()
    write_trace(make_workload(), 10, profile)
    (file,) = (own_home / "traces").iterdir()
    return profile, file


def test_a_trace_is_of_one_model_shape_family_and_software(traced, monkeypatch):
    profile, _ = traced

    def read(parameters=10, family=profile.family, length=128, **model):
        return read_trace(make_workload(model=make_spec(**model), sequence_length=length), parameters, family)

    assert read(name="another", reference="./another", path="/another") == profile
    assert read(config={"hidden_size": 12_345}) is None
    assert read(freeze_vision=True) is None
    assert read(length=7) is None
    assert read(parameters=11) is None
    assert read(family=make_family(autocast="bfloat16")) is None
    monkeypatch.setattr("autotune.storage.home.installed_versions", lambda: {"torch": "0.1"})
    assert read() is None


@pytest.mark.parametrize(
    "spoil", [lambda b: b[: len(b) // 2], lambda b: b[:-12] + b"x" * 12, lambda b: b"", lambda b: b"{}"]
)
def test_a_spoilt_trace_is_removed_without_a_word_and_made_anew(traced, spoil, caplog):
    profile, file = traced
    file.write_bytes(spoil(file.read_bytes()))
    assert read_trace(make_workload(), 10, profile.family) is None
    assert not file.exists()
    assert caplog.records == []
    write_trace(make_workload(), 10, profile)
    assert read_trace(make_workload(), 10, profile.family) == profile


def test_the_traces_read_the_longest_ago_go_when_all_are_too_large(traced, monkeypatch):
    profile, file = traced
    other, third = make_family(autocast="bfloat16"), make_family(dtype="bfloat16")
    write_trace(make_workload(), 10, profile.model_copy(update={"family": other}))
    (newer,) = set(file.parent.iterdir()) - {file}
    (mine := file.parent / "mine.json.gz").write_bytes(bytes(1 << 20))
    os.utime(newer, (2e9, 2e9))
    os.utime(file, (1e9, 1e9))
    read_trace(make_workload(), 10, profile.family)  # which makes it newer than an old one
    os.utime(newer, (1e9, 1e9))
    monkeypatch.setattr("autotune.storage.home._MOST_TRACES_BYTES", 2 * file.stat().st_size + 100)
    write_trace(make_workload(), 10, profile.model_copy(update={"family": third}))
    assert (newer.exists(), file.exists(), mine.exists()) == (False, True, True)
    assert read_trace(make_workload(), 10, third) is not None


def test_traces_of_a_models_own_code_are_not_stored(own_home):
    write_trace(make_workload(model=make_spec(trust_remote_code=True)), 10, make_profile())
    assert not own_home.exists()


ADDING = """
import sys
from factories import make_hardware
from autotune.cost.corrections import Observation
from autotune.storage.home import add_observations, add_timings
from autotune.values.estimate import Timings

print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    key = f"{sys.argv[2]}{number}"
    found = Observation(key=key, memory_features={}, memory={"device": 1.0}, time_features={}, log_time=None)
    add_observations(make_hardware(), "llama", [found])
    add_timings(make_hardware(), Timings(operators={key: 1.0}, operator_s=1.0, micro_step_s=1.0))
"""


def test_what_two_searches_add_at_once_is_all_there():
    assert run_at_once(ADDING, "", "ab") == [(0, "")] * 2
    wanted = {f"{name}{number}" for name in "ab" for number in range(40)}
    assert {o.key for o in read_observations(make_hardware(), "llama")} == wanted
    assert read_timings(make_hardware()).operators.keys() == wanted
