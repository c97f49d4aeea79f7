"""A search that is killed at any moment, however often, loses no finished trial and measures none twice.

`pytest tests/faults/test_kills.py -m slow --kills 1000` kills replayed searches so often, counted when they died of it.
"""

import random
import signal
import time

from faults.kept import Kept
from faults.replaying import LAUNCHES, Search, finish, run, said

MOST_TO_ONE = 15  # kills of one search, which then goes on to its end
LIMIT_S = 120.0

# Who is killed: a search at one place, one whose trials run two at a time, and one of an unchanged script.
KINDS = ("find", "workers", "script")


def kill(server, search: Search) -> bool:
    """Go on with a search, and kill it; return whether it died of that.

    Mostly that is a moment after one of the next trials has begun, otherwise any moment since its process was started.
    """
    process, begun = server.Process(target=run, args=(search,)), launches(search)
    process.start()
    if random.random() < 0.8:
        deadline, wanted = time.monotonic() + LIMIT_S, begun + random.randint(1, 3)
        while launches(search) < wanted and process.is_alive():
            assert time.monotonic() < deadline, "it hangs"
            time.sleep(0.002)
        process.join(random.uniform(0.0, 0.1))
    else:
        process.join(random.uniform(0.0, 1.0))
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), said(search)
    return process.exitcode == -signal.SIGKILL


def launches(search: Search) -> int:
    """Return how many trials have begun."""
    path = search.run / LAUNCHES
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_searches_keep_all_that_has_finished(server, begin, request):
    wanted = request.config.getoption("--kills")
    kills = finished = searches = 0
    while kills < wanted:
        search = begin(KINDS[searches % len(KINDS)])
        kept = Kept(search)
        for _ in range(min(MOST_TO_ONE, wanted - kills)):
            kills += kill(server, search)
            kept.look()
        assert finish(server, search) == 0, said(search)
        kept.check_end()
        searches, finished = searches + 1, finished + len(kept.finished)
        print(f"{kills} kills in {searches} searches, {finished} trials finished", flush=True)
