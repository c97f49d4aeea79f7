"""Full disks at every write, folders that are read-only or vanish, and clocks that are set, one row each.

By default a few writes of two rows fail; every write of every row with `-m slow`.
"""

import errno
import json
import re
import time
from typing import NamedTuple

import pytest
from faults.faults import AtWrite, SmallRecord, clock_jumps
from faults.kept import Kept
from faults.replaying import Search, finish, said

from autotune.values.time_spent import wall_s

STRIDE = 89
SHORT = ("full", "home full")
MOST = 1000  # writes of a search of two trials, at the most


class Row(NamedTuple):
    """What happens at a write: where, by which error (0: the folder is removed), and how the search may end."""

    place: str  # "run" or "home"
    number: int
    codes: tuple[int, ...]  # exit codes that are right
    words: str  # said if it doesn't end well
    lasting: bool = True  # whether later writes fail as well


ROWS = {
    "full": Row("run", errno.ENOSPC, (0, 4), "disk is full|No space left"),
    "full for a moment": Row("run", errno.ENOSPC, (0, 4), "disk is full|No space left", lasting=False),
    "over quota": Row("run", errno.EDQUOT, (0, 4), "disk is full|quota exceeded"),
    "read-only": Row("run", errno.EROFS, (0, 2, 4), "can't be written: Read-only file system"),
    "home full": Row("home", errno.ENOSPC, (0,), ""),
    "home read-only": Row("home", errno.EROFS, (0,), ""),
    "home vanishes": Row("home", 0, (0,), ""),
}


def fail_at(server, search: Search, row: Row, write: int) -> bool:
    """Have a search fail at a write, and go on with it; return whether there were so many writes."""
    folder = search.run if row.place == "run" else search.home
    fault, kept = AtWrite(folder, write, row.number, row.lasting), Kept(search)
    code = finish(server, search, fault)
    if not fault.mark.exists():
        assert code == 0, said(search)
        return False
    assert code in row.codes, f"write {write}: exit code {code}: {said(search)}"
    if code:
        (line,) = [line for line in said(search).splitlines() if line.startswith("autotune: ")][-1:]
        assert re.search(row.words, line)
    if search.run.exists():
        kept.look()
        littered = list(search.run.rglob(".*"))
        assert littered == [], f"write {write}: temporary files have stayed"
    if row.place == "run":  # there is room again
        assert finish(server, search) == 0, f"after write {write}: {said(search)}"
        kept.check_end()
    return True


SLOW = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.mark.parametrize(
    ("name", "stride"), [*((name, STRIDE) for name in SHORT), *(pytest.param(name, 1, marks=SLOW) for name in ROWS)]
)
def test_a_search_survives_what_happens_at_each_write(server, begin, name, stride):
    row = ROWS[name]
    for write in range(1, MOST, stride):
        if not fail_at(server, begin("find", max_trials=2), row, write):
            assert write > 1
            print(f"{write - 1} writes")
            return
    raise AssertionError("a search of two trials has no end of writes")


@pytest.mark.parametrize("write", [40, *(pytest.param(write, marks=SLOW) for write in range(41, 120, 3))])
def test_a_run_directory_that_vanishes_ends_the_search_in_a_line(server, begin, write):
    search = begin("find", max_trials=4)
    assert finish(server, search, AtWrite(search.run, write, number=0, lasting=False)) == 4
    assert "was removed while the search ran" in said(search)
    assert not search.run.exists() or not list(search.run.glob("trials/*/result.json"))


@pytest.mark.parametrize("most_bytes", [pytest.param(100, marks=pytest.mark.slow), 5000])
def test_a_record_without_room_costs_a_line_and_is_caught_up(server, begin, most_bytes):
    search = begin("find", max_trials=2)
    assert finish(server, search, SmallRecord(most_bytes)) == 0, said(search)
    assert "no space left" in said(search)
    Kept(search).look()
    assert finish(server, search) == 0
    Kept(search).check_end()


@pytest.mark.parametrize("kind", ["find", "workers"])
def test_a_clock_that_is_set_changes_no_duration(server, begin, kind):
    search = begin(kind, max_trials=6)
    began = time.monotonic()
    assert finish(server, search, clock_jumps) == 0, said(search)
    elapsed_s, kept = time.monotonic() - began, Kept(search)
    results = list(kept.look().values())
    kept.check_end()
    assert all(0 < result.duration_s < elapsed_s for result in results)
    assert 0 < wall_s(results) <= elapsed_s
    alone = [result for result in results if not result.request.in_turn_with]
    if kind == "find":
        whole_s = sum(result.duration_s for result in alone)
        assert wall_s(alone) == pytest.approx(whole_s, abs=1e-5)  # a start is since 1970: in doubles to 0.2 us
    spent = json.loads((search.run / "best-config.json").read_text())["spent"]
    assert all(seconds >= 0 for seconds in spent["starting"].values())
    assert sum(spent["starting"].values()) < elapsed_s
