"""Trackers with the real libraries, offline: what a search tells them is read back from their own files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from factories import OUT_OF_MEMORY, make_config, make_plan, make_result
from finished_searches import make_search

from autotune.errors import InputError
from autotune.integrations.trackers import Tracking, check
from autotune.storage.run_directory import RunDirectory
from autotune.values.problem import Event, Note, TrialEnded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # the libraries' own
]

TRIALS = (
    make_result(make_config(8), 10.0, number=0),
    make_result(make_config(16), 20.0, number=1),
    make_result(make_config(16, optim="adafactor"), OUT_OF_MEMORY, number=2),
)


def search(directory: Path, name: str, *numbers: int, answer: bool = False) -> list[str]:
    """Tell a tracker of trials, as `find` and `resume` do; return the notes."""
    heard: list[Event] = []
    directory.mkdir(exist_ok=True)
    made = Tracking(make_plan(report_to=(name,)), RunDirectory(directory), heard.append)
    for number in numbers:
        made(TrialEnded(result=TRIALS[number], changes=()))
    if answer:
        made.end(make_search(directory.parent / "finished")[1])
    return [event.text for event in heard if isinstance(event, Note)]


def searched(folder: Path, name: str) -> Path:
    """Return the run directory of a search that was gone on with after two of its three trials."""
    assert search(folder / "run", name, 0, 1) == []
    assert search(folder / "run", name, 2, answer=True) == []
    return folder / "run"


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = searched(tmp_path, "tensorboard")
    folders = sorted(path.name for path in (run / "tensorboard").iterdir())
    assert folders == ["answer-0016", "trial-0000", "trial-0001", "trial-0002"]
    one = EventAccumulator(str(run / "tensorboard" / "trial-0001"))
    one.Reload()
    assert [(event.step, event.value) for event in one.Scalars("samples_per_second")] == [(1, 20.0)]
    assert one.Scalars("peak_memory_gib")[0].value == 1.0
    from tensorboard.plugins.hparams import plugin_data_pb2

    content = one.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    started = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert started.hparams["per_device_train_batch_size"].number_value == 16
    assert started.hparams["status"].string_value == "completed"


def test_wandb_offline_beside_a_run_of_the_users_own(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb.init(dir=str(tmp_path)) as own:
        run = searched(tmp_path, "wandb")
        own.log({"loss": 1.0})  # raises once the run is finished
        assert (wandb.run is own, dict(own.config)) == (True, {})
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 4
    records = [record for file in files for record in read_wandb(file)]
    runs = {r.run.display_name: r.run for r in records if r.WhichOneof("record_type") == "run"}
    assert {r.run_group for r in runs.values()} == {"run"}
    assert {name: r.job_type for name, r in runs.items()} == {
        "trial-0000": "search", "trial-0001": "search", "trial-0002": "search", "answer-0016": "answer"
    }  # fmt: skip
    configs = [{i.key: i.value_json for i in (*r.config.update, *r.run.config.update)} for r in records]  # by version
    assert {json.loads(c["status"]) for c in configs if "status" in c} >= {"completed", "out of memory", "faster"}
    histories = [r.history.item for r in records if r.HasField("history")]
    figures = [{i.key or i.nested_key[0]: i.value_json for i in items} for items in histories]
    assert {10.0, 20.0} <= {json.loads(f["samples_per_second"]) for f in figures if "samples_per_second" in f}


def read_wandb(file: Path) -> list:
    """Return the records of an offline run: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, found, part = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:  # a header doesn't fit: the block is padded
            at += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several parts
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


def test_wandb_without_a_login_is_said_before_the_search(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(InputError, match="run `wandb login`, or set WANDB_MODE=offline"):
        check(("wandb",))
    monkeypatch.setenv("WANDB_MODE", "offline")
    check(("wandb",))


def test_mlflow_beside_a_run_of_the_users_own(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    own = mlflow.set_experiment("own")
    with mlflow.start_run() as first:
        searched(tmp_path, "mlflow")
        assert mlflow.active_run().info.run_id == first.info.run_id
    with mlflow.start_run() as later:
        assert later.info.experiment_id == own.experiment_id
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("autotune")
    runs = {r.info.run_name: r for r in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"trial-0000", "trial-0001", "trial-0002", "answer-0016"}
    assert {r.data.params["search"] for r in runs.values()} == {"run"}
    assert runs["trial-0001"].data.params["per_device_train_batch_size"] == "16"
    assert runs["trial-0001"].data.metrics["samples_per_second"] == 20.0
    assert runs["trial-0002"].data.params["cause"] == "no memory left"
    assert runs["answer-0016"].data.params["status"] == "faster"
    assert {r.info.status for r in runs.values()} == {"FINISHED"}
    (point,) = client.get_metric_history(runs["trial-0001"].info.run_id, "samples_per_second")
    assert (point.step, point.value) == (1, 20.0)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_cant_write_is_a_note(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/none/mlflow.db")
    run = tmp_path / "run"
    run.mkdir()
    (run / "tensorboard").write_text("a file where a folder is wanted")
    (run / "wandb").write_text("the same")
    notes = search(run, name, 0, 1)
    assert len(notes) <= 1
    if name != "wandb":  # it writes to a temporary folder then
        assert notes[0].startswith(f"{name}: ")
