"""A record on a PostgreSQL server that is stopped and started again while a search runs."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from faults.kept import Kept
from faults.replaying import finish, run, said

NOBODY = 65534  # the server refuses to run as root
PROGRAMS = {name: shutil.which(name) for name in ("initdb", "pg_ctl")}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(None in PROGRAMS.values(), reason="no PostgreSQL server is installed (initdb, pg_ctl)"),
]


class Server:
    """A server of the test's own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._user = folder, NOBODY if os.getuid() == 0 else None
        if self._user is not None:
            os.chown(folder, NOBODY, NOBODY)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._call("initdb", "-A", "trust", "-U", "ann", "--no-sync")
        self.url = f"postgresql://ann@127.0.0.1:{self._port}/postgres"

    def _call(self, program: str, *words: str) -> None:
        command = [PROGRAMS[program], "-D", str(self._folder / "data"), *words]
        with (self._folder.parent / "server.txt").open("a") as said:
            done = subprocess.run(command, stdout=said, stderr=said, user=self._user, timeout=120, cwd="/")
        assert done.returncode == 0, (self._folder.parent / "server.txt").read_text()

    def start(self) -> None:
        options = f"-p {self._port} -k {self._folder} -c listen_addresses=127.0.0.1"
        self._call("pg_ctl", "-w", "-l", str(self._folder / "log.txt"), "-o", options, "start")

    def stop(self) -> None:
        self._call("pg_ctl", "-m", "immediate", "stop")


@pytest.fixture
def database():
    """A server that runs; its user reaches its folder, which pytest's own folders would not let it."""
    pytest.importorskip("psycopg")
    with tempfile.TemporaryDirectory(prefix="autotune-") as name:
        above = Path(name)
        above.chmod(0o711)
        (above / "server").mkdir()
        server = Server(above / "server")
        server.start()
        yield server
        server.stop()


@pytest.mark.parametrize("away_s", [3.0, 20.0])
def test_a_server_that_is_stopped_and_started_has_all_trials_in_the_end(server, begin, database, away_s):
    search = begin("find", max_trials=12)._replace(server=database.url)
    process = server.Process(target=run, args=(search,))
    process.start()
    while not (search.run / "trials/0003/result.json").exists():
        assert process.is_alive(), said(search)
        time.sleep(0.01)
    database.stop()
    process.join(away_s)
    database.start()
    process.join()
    assert process.exitcode == 0, said(search)
    assert "the search goes on without it" in said(search)
    assert finish(server, search) == 0, said(search)  # which writes what the server missed
    Kept(search).check_end()
