"""What the fault suite shares: processes that searches run in, and what is known of their models."""

import functools
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from faults import replaying
from faults.replaying import FIND, LIMITS, Search, finish, said
from own_trainings import SCRIPT


@pytest.fixture(scope="session")
def server():
    return replaying.server()


@pytest.fixture(scope="session")
def kinds(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The options of each kind of search: at one place, two trials at a time, of an unchanged script."""
    script: Path = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "--output_dir", str(script.parent / "out"), "--use_cpu", "true"]
    return {"find": FIND, "workers": {**FIND, "workers": 2}, "script": {**LIMITS, "script": command}}


@pytest.fixture(scope="session")
def answers(server, kinds, tmp_path_factory):
    """Return a function that gives what the launcher's children say of a kind's model, from a first search of it."""

    @functools.cache
    def of(kind: str) -> Path:
        known, folder = (tmp_path_factory.mktemp(name) for name in ("answers", "first"))
        (folder / "home").mkdir()
        first = Search(folder / "run", folder / "home", known, {**kinds[kind], "max_trials": 1})
        assert finish(server, first) == 0, said(first)
        return known

    return lambda kind: of("find" if kind == "workers" else kind)  # of the same model


@pytest.fixture(scope="session")
def searched() -> dict[str, Search]:
    """The searches of `stopped`, by kind."""
    return {}


@pytest.fixture
def stopped(server, begin, searched, tmp_path_factory, tmp_path):
    """Return a function that gives a search of two trials, which is to go on to five; each kind is searched once."""

    def of(kind: str = "find") -> Search:
        if kind not in searched:
            first = begin(kind, max_trials=2)
            assert finish(server, first) == 0, said(first)
            kept = tmp_path_factory.mktemp("stopped") / kind
            shutil.copytree(first.home.parent, kept)
            searched[kind] = first._replace(run=kept / "run", home=kept / "home")
        source, folder = searched[kind], tmp_path / f"stopped-{kind}"
        shutil.copytree(source.home.parent, folder)
        return source._replace(run=folder / "run", home=folder / "home")

    return of


@pytest.fixture
def begin(tmp_path, kinds, answers):
    """Return a function that gives a search of a kind, kept in a folder of its own."""

    def begun(kind: str, **options: object) -> Search:
        folder = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}"
        (folder / "home").mkdir(parents=True)
        return Search(folder / "run", folder / "home", answers(kind), {**kinds[kind], **options})

    return begun
