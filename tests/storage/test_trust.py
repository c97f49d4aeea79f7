"""Whose code a run directory has run: what was handed over here, and what its user vouches for."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from factories import make_config, make_plan, make_spec, make_workload
from finished_searches import make_search
from own_trainings import planted
from pydantic import ValidationError
from typer.testing import CliRunner

import autotune
from autotune.cli.main import app
from autotune.errors import MachineError, RunDirectoryError
from autotune.search.explain import explain
from autotune.storage import trust
from autotune.storage.run_directory import RunDirectory
from autotune.value import sha256_of
from autotune.values.hardware import detect
from autotune.values.model import ModelSpec, Task
from autotune.values.problem import Fleet
from autotune.values.workload import CODE_FILE, STEP_FILE, OwnCode, OwnStep

pytestmark = pytest.mark.usefixtures("own_home")
REMOTE = make_spec(trust_remote_code=True, config={"auto_map": {"AutoConfig": "configuration.Config"}})


def code(**fields) -> OwnCode:
    return OwnCode(**{"kind": "script", "shown": "s", "command": ("t.py", "--x"), "directory": "/ann", **fields})


def step(**fields) -> OwnStep:
    own = {"name": "make", "takes_accumulation": False, "knobs": {}, "directory": "/ann", "search_path": ("/ann",)}
    return OwnStep(**{**own, "sha256": "a" * 64, **fields})


def plan_of(**fields):
    return make_plan(workload=make_workload(**fields))


PLANS = {
    "a script": (plan_of(own_code=code()), "runs `python t.py --x` in /ann"),
    "pickled code": (plan_of(own_code=code(kind="pickle", command=(), sha256="a" * 64)), "unpickles data/own-code.pkl"),
    "a loop": (plan_of(own_step=step()), "unpickles data/own-step.pkl"),
    "a model's code": (plan_of(model=REMOTE), f"runs code of the model {REMOTE.name}"),
    "kernels": (plan_of(model=make_spec(config={"text_config": {"_attn_implementation": "evil/kernel"}})),
                "runs kernels of evil/kernel"),
    "a cluster": (make_plan(fleet=Fleet(engine="ray", address="ray://evil:1")), "joins the cluster at ray://evil:1"),
    "a tracker": (make_plan(report_to=("wandb",)), "tells wandb of its trials"),
    "an output": (make_plan(output="/ann/.bashrc"), "writes its answer to /ann/.bashrc"),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "said"), PLANS.values(), ids=PLANS)
def test_what_was_not_handed_over_here_is_named_and_refused_until_somebody_vouches_for_it(plan, said, tmp_path):
    with pytest.raises(RunDirectoryError) as caught:
        trust.check(tmp_path, plan, trusted=False)
    assert said in str(caught.value)
    assert "--trust-run-dir" in str(caught.value)
    assert (str(caught.value).count("\n"), caught.value.exit_code) == (0, 2)
    trust.check(tmp_path, plan, trusted=True)  # who vouches for it is asked once
    trust.check(tmp_path / "wherever it lies", plan, trusted=False)


def test_a_model_of_the_library_is_nobodys_code(tmp_path, own_home):
    trust.check(tmp_path, make_plan(), trusted=False)
    trust.remember(make_plan())
    assert not own_home.exists()


CHANGES = {
    "another command": {"own_code": code(command=("t.py", "--y"))},
    "another place": {"own_code": code(directory="/tmp/unpacked")},
    "a module": {"own_code": code(is_module=True)},
    "another kind": {"own_code": code(kind="pickle")},
    "another pickle": {"own_step": step(sha256="b" * 64)},
    "other modules": {"own_step": step(search_path=("/tmp/unpacked", "/ann"))},
    "another repository": {"model": REMOTE.model_copy(update={"config": {"auto_map": {"AutoConfig": "evil/x--c.C"}}})},
    "another model": {"model": REMOTE.model_copy(update={"name": "evil/model"})},
    "another folder": {"model": REMOTE.model_copy(update={"source": "directory", "path": "/tmp/unpacked"})},
    "another revision": {"model": REMOTE.model_copy(update={"revision": "main"})},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_what_was_changed_is_no_longer_what_was_handed_over(changes, tmp_path):
    for plan, _ in PLANS.values():
        trust.remember(plan)
    with pytest.raises(RunDirectoryError, match="--trust-run-dir"):
        trust.check(tmp_path, plan_of(**changes), trusted=False)


def test_a_folder_called_as_a_model_of_the_hub_is_not_that_model(tmp_path, monkeypatch):
    """The library prefers the folder, which may have come with the run directory."""
    model = REMOTE.model_copy(update={"name": "ann/model", "source": "hub"})
    trust.remember(plan_of(model=model))
    (tmp_path / "ann" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirectoryError, match="runs code of the model ann/model"):
        trust.check(tmp_path, plan_of(model=model), trusted=False)


def test_where_nothing_can_be_noted_it_has_to_be_asked_for(tmp_path, own_home):
    own_home.write_text("no folder")
    plan, _ = PLANS["a script"]
    trust.remember(plan)
    with pytest.raises(RunDirectoryError, match="--trust-run-dir"):
        trust.check(tmp_path, plan, trusted=False)
    trust.check(tmp_path, plan, trusted=True)


def test_kernels_of_the_hub_are_no_value_of_a_knob():
    attention, experts = "attn_implementation", "experts_implementation"
    for field, value in (attention, "evil/kernel"), (experts, "evil/kernel"), (experts, "sonicmoe"):
        with pytest.raises(ValidationError, match="kernels of a repository on the hub are not offered"):
            make_config(**{field: value})
    with pytest.raises(ValidationError):
        make_plan(baseline={**make_config().model_dump(), "attn_implementation": "evil/kernel"})


@pytest.fixture
def unpacked(tmp_path) -> Path:
    """A run directory from elsewhere whose pickled function makes a file when it is loaded."""
    path, content = tmp_path / "run", planted(tmp_path / "ran")
    own = step(directory=str(tmp_path), search_path=(), sha256=sha256_of(content))
    spec = ModelSpec(reference="make", name="make", source="own", model_type="own", kind="own", config={})
    plan = make_plan(hardware=detect("cpu"), workload=make_workload(model=spec, task=Task.OWN, own_step=own))
    directory = RunDirectory.create(path)
    directory.write_plan(plan)
    (path / "data").mkdir()
    (path / "data" / STEP_FILE).write_bytes(content)
    (path / "data" / CODE_FILE).write_bytes(content)
    return path


def test_a_search_from_elsewhere_is_not_gone_on_with_unasked(unpacked, tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    before = (unpacked / "search.json").read_bytes()
    with pytest.raises(RunDirectoryError, match=r"unpickles data/own-step\.pkl"):
        autotune.resume(unpacked)
    done = CliRunner().invoke(app, ["resume", str(unpacked), "--json"])
    assert done.exit_code == 2
    assert "unpickles data/own-step.pkl; if you trust" in json.loads(done.stdout)["error"]["message"]
    assert (unpacked / "search.json").read_bytes() == before
    assert not (unpacked / "trials").exists()
    assert not (tmp_path / "ran").exists()


def _fail(*_, **__):
    raise MachineError("no further than this")


def test_a_search_that_is_trusted_goes_on(unpacked, monkeypatch):
    monkeypatch.setattr("autotune.api.backend_of", _fail)
    for words in (["--trust-run-dir"], []):  # and isn't asked for again
        done = CliRunner().invoke(app, ["resume", str(unpacked), *words])
        assert (done.exit_code, "no further than this" in done.stderr) == (3, True)


def test_an_output_that_is_named_anew_is_the_users_own_and_each_is_looked_at_first(tmp_path, monkeypatch):
    RunDirectory.create(tmp_path / "run").write_plan(make_plan(hardware=detect("cpu"), output="/ann/.bashrc"))
    monkeypatch.setattr("autotune.api.backend_of", _fail)
    told = {"": "writes its answer to /ann", "--trust-run-dir": "--output /ann", f"-o {tmp_path}/my.json": "no further"}
    for words, said in told.items():
        done = CliRunner().invoke(app, ["resume", str(tmp_path / "run"), *words.split()])
        assert said in done.stderr


@pytest.mark.usefixtures("lent")
def test_a_search_that_was_begun_here_is_gone_on_with(tmp_path, monkeypatch):
    """What `find` hands over is noted before the first trial."""
    monkeypatch.setattr("autotune.api.conduct", _fail)
    run = tmp_path / "run"

    def make(config):
        return lambda: None

    with pytest.raises(autotune.AutotuneError, match="no further"):
        autotune.find(step=make, knobs=["per_device_train_batch_size"], device="cpu", effort="quick", run_dir=run)
    kept = json.loads((run / "search.json").read_bytes())["workload"]["own_step"]
    assert kept["sha256"] == sha256_of((run / "data" / STEP_FILE).read_bytes())
    with pytest.raises(autotune.AutotuneError, match="no further"):
        autotune.resume(run)
    shutil.rmtree(tmp_path / "home")
    with pytest.raises(RunDirectoryError, match=r"unpickles data/own-step\.pkl"):
        autotune.resume(run)


def test_an_explanation_asks_as_well(tmp_path):
    plan, _ = make_search(tmp_path / "run")
    workload = plan.workload.model_copy(update={"own_code": code()})
    RunDirectory(tmp_path / "run").write_plan(plan.model_copy(update={"workload": workload}))
    with pytest.raises(RunDirectoryError, match=r"runs `python t\.py --x` in /ann.*--trust-run-dir"):
        explain(tmp_path / "run")
