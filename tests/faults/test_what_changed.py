"""What is another one when a search goes on: versions, machine, model, script, files that were damaged, the record."""

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.kept import Kept
from faults.replaying import LIMIT_S, Search, finish, said

from autotune.storage.run_directory import read_result
from autotune.values import hardware

DAMAGE = {
    "half": lambda content: content[: len(content) // 2],
    "nothing": lambda content: b"",
    "zeros": lambda content: b"\0" * len(content),
    "garbled": lambda content: b"\xff\xfe" + content[::-1],
    "another object": lambda content: b'{"schema_version": 2, "mark": 5, "id": []}',
    "a list": lambda content: b"[1, 2, 3]",
}
READ_AGAIN = ("best-config.json", "trace/answer.json", "processes.json", "trials/0001/result.json")


def more(search: Search) -> Search:
    """The same with more trials: what a user does by --max-trials."""
    plan = json.loads((search.run / "search.json").read_text())
    plan["budget"]["max_trials"], plan["reopened_at"] = 5, 1000
    (search.run / "search.json").write_text(json.dumps(plan))
    return search


def other_versions() -> None:
    now = {**hardware.installed_versions(), "torch": "2.99.0"}
    hardware.installed_versions = lambda: now


def other_machine() -> None:
    name = hardware._cpuinfo
    hardware._cpuinfo = lambda field: "Another CPU" if field == "model name" else name(field)


def test_other_versions_are_told_stand_in_the_answer_and_are_not_recorded(server, stopped):
    search = more(stopped())
    before = search.recorded()[0].trials
    assert finish(server, search, other_versions) == 0, said(search)
    notes = read_result(search.run / "best-config.json").notes
    assert [note for note in notes if note.startswith("since the search: ") and "is now 2.99.0" in note]
    assert len(Kept(search).look()) > len(before)
    assert search.recorded()[0].trials == before


def test_another_machine_is_refused(server, stopped):
    search = more(stopped())
    kept = Kept(search)
    before = kept.look()
    assert finish(server, search, other_machine) == 3
    assert "this is Another CPU" in said(search)
    assert kept.look() == before


def test_a_script_that_was_changed_is_told(server, stopped):
    search = more(stopped("script"))
    script = Path(search.options["script"][1])
    before = script.stat()
    script.write_text(script.read_text() + "# changed")
    os.utime(script, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert finish(server, search) == 0, said(search)
    assert any(f"{script} has changed" in note for note in read_result(search.run / "best-config.json").notes)


DAMAGED = {f"{name}-{damage}": {name: damage} for name in READ_AGAIN for damage in DAMAGE}


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(dict(zip(READ_AGAIN, DAMAGE, strict=False)), id="each in another way"),
        *(pytest.param(damaged, id=name, marks=pytest.mark.slow) for name, damaged in DAMAGED.items()),
    ],
)
def test_a_damaged_file_costs_what_was_in_it_alone(server, stopped, damaged):
    search = more(stopped())
    kept, result = Kept(search), "trials/0001/result.json"
    finished = kept.look()
    for name, damage in damaged.items():
        path = search.run / name
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert finish(server, search) == 0, said(search)
    if result in damaged:  # what its process had written is still there
        assert "trial 1: result.json can't be read; recovered" in said(search)
        kept.finished[1] = (search.run / result).read_bytes()
    after = kept.look()
    if result in damaged:
        assert after[1].outcome == finished[1].outcome
        assert after[1].began == pytest.approx(finished[1].began, abs=0.1)
    assert {n: r for n, r in after.items() if n in finished and n != 1} == {n: r for n, r in finished.items() if n != 1}
    assert read_result(search.run / "best-config.json").verdict


def test_a_trial_that_had_ended_when_the_search_was_killed_is_not_run_again(server, stopped):
    search = more(stopped())
    kept, path = Kept(search), search.run / "trials/0001/result.json"
    finished = kept.look()
    path.unlink()
    assert finish(server, search) == 0, said(search)
    assert "trial 1: result.json was not written yet; recovered" in said(search)
    kept.finished[1] = path.read_bytes()
    assert kept.look()[1].outcome == finished[1].outcome
    kept.check_end()


def test_a_result_of_which_nothing_is_left_is_told(server, stopped):
    search = more(stopped())
    for name in ("result.json", "rank-0.json"):
        (search.run / "trials/0001" / name).write_text("{")
    assert finish(server, search) == 0, said(search)
    assert "trial 1: result.json can't be read; its measurement counts no more" in said(search)


@pytest.mark.parametrize("damage", [pytest.param(d, marks=[pytest.mark.slow] if d != "half" else []) for d in DAMAGE])
def test_a_damaged_plan_is_refused_in_a_line_and_nothing_else_is_touched(server, stopped, damage):
    search = stopped()
    path = search.run / "search.json"
    content = path.read_bytes()
    path.write_bytes(DAMAGE[damage](content))
    assert finish(server, search) == 2
    assert "search.json can't be read" in said(search) or "start a new search" in said(search)
    path.write_bytes(content)
    Kept(search).look()


GIVEN_UP = "the search goes on without it"


@contextlib.contextmanager
def held(search: Search) -> Iterator[None]:
    """Every other process is kept from the record until the search has said so."""

    def hold() -> None:
        ends = time.monotonic() + LIMIT_S
        with search.record.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            while GIVEN_UP not in said(search) and time.monotonic() < ends:
                time.sleep(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    yield
    thread.join()


@contextlib.contextmanager
def away(search: Search) -> Iterator[None]:
    """Something else stands where the record was."""
    aside = search.record.with_suffix(".aside")
    search.record.rename(aside)
    search.record.mkdir()
    yield
    search.record.rmdir()
    aside.rename(search.record)


@pytest.mark.parametrize("hindered", [pytest.param(held, marks=pytest.mark.slow), away])
def test_a_record_that_can_not_be_written_for_a_while_has_all_trials_in_the_end(server, stopped, hindered):
    search = more(stopped())
    with hindered(search):
        assert finish(server, search) == 0, said(search)
    assert GIVEN_UP in said(search)
    assert finish(server, search) == 0
    Kept(search).check_end()


def test_a_damaged_record_is_told_and_left_as_it_is(server, begin):
    search, content = begin("find", max_trials=2), b"\0" * 4096
    search.record.write_bytes(content)
    assert finish(server, search) == 0, said(search)
    assert f"{search.record}: can't be used: damaged" in said(search)
    assert search.record.read_bytes() == content
    assert read_result(search.run / "best-config.json").verdict
