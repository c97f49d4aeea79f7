"""What the fault suite shares: processes that searches run in, and what is known of their models."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from faults.replaying import Search

_SEARCHED: pytest.StashKey[dict[str, Any]] = pytest.StashKey()


@pytest.fixture(scope="session")
def server():
    """What starts processes that have everything imported."""
    from faults import replaying

    return replaying.server()


@pytest.fixture(scope="session")
def kinds(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The options of each kind of search: at one place, two trials at a time, of an unchanged script."""
    from faults.replaying import FIND, LIMITS
    from own_trainings import SCRIPT

    script: Path = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "--output_dir", str(script.parent / "out"), "--use_cpu", "true"]
    return {"find": FIND, "workers": {**FIND, "workers": 2}, "script": {**LIMITS, "script": command}}


@pytest.fixture(scope="session")
def answers(server, kinds, tmp_path_factory):
    """Return a function that gives what the launcher's children say of a kind's model, from a first search of it."""
    from faults.replaying import Search, finish, said

    known: dict[str, Path] = {}

    def of(kind: str) -> Path:
        kind = "find" if kind == "workers" else kind  # of the same model
        if kind not in known:
            known[kind] = tmp_path_factory.mktemp("answers")
            folder = tmp_path_factory.mktemp("first")
            (folder / "home").mkdir()
            first = Search(folder / "run", folder / "home", known[kind], {**kinds[kind], "max_trials": 1})
            assert finish(server, first) == 0, said(first)
        return known[kind]

    return of


@pytest.fixture
def stopped(server, begin, tmp_path_factory, tmp_path, request):
    """Return a function that gives a search of two trials, which is to go on to five; each kind is searched once."""
    from faults.replaying import finish, said

    searched: dict[str, Search] = request.session.stash.setdefault(_SEARCHED, {})

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
    from faults.replaying import Search

    def begun(kind: str, **options: object) -> Search:
        folder = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}"
        (folder / "home").mkdir(parents=True)
        return Search(folder / "run", folder / "home", answers(kind), {**kinds[kind], **options})

    return begun
