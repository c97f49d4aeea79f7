"""Databases by their URL: which are taken, how, and that a password is never shown."""

import importlib
import logging
import sys

import pytest
import sqlalchemy as sa

from autotune.errors import InputError, MachineError, RecordError
from autotune.storage import database
from autotune.storage.database import VARIABLE, Database

SECRET = "s3cr3t!"

WRITTEN = {
    "as it is": f"postgresql://ann:{SECRET}@127.0.0.1:1/team",
    "percent signs": "postgresql://ann:s3cr3t%21@127.0.0.1:1/team",
    "with options": f"postgresql://ann:{SECRET}@127.0.0.1:1/team?connect_timeout=1&application_name=tune",
    "of a driver that isn't there": f"mssql+pymssql://ann:{SECRET}@127.0.0.1/team",
    "of no database": f"nosuch://ann:{SECRET}@127.0.0.1/team",
    "without a scheme": f"ann:{SECRET}@127.0.0.1/team",
    "with a port that is none": f"postgresql://ann:{SECRET}@127.0.0.1:port/team",
    "in the query": f"nosuch://127.0.0.1/team?password={SECRET}",
}


@pytest.mark.parametrize("url", WRITTEN.values(), ids=WRITTEN)
def test_a_password_is_never_shown(url, caplog):
    caplog.set_level(logging.DEBUG)
    shown = ""
    try:
        database = Database(url)
        shown = database.where
        with database.reading() as connection:
            connection.scalar(sa.text("SELECT 1"))
    except (InputError, MachineError) as error:
        shown += str(error)
    assert shown
    assert "s3cr3t" not in shown + caplog.text


def test_what_a_server_repeats_of_the_password_is_masked(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'record.db'}")
    database.url = sa.make_url(f"postgresql+psycopg://ann:{SECRET}@host/team")
    with pytest.raises(RecordError, match=r"no such: \*\*\* or \*\*\*$"), database.translated():
        raise OSError(f"no such: {SECRET} or s3cr3t%21")


@pytest.mark.parametrize(
    "url", ["/data/record.db", "nosuch://host/db", "sqlite://", "sqlite:///:memory:", "sqlite:///"]
)
def test_what_is_no_url_of_a_lasting_database_is_refused(url):
    with pytest.raises(InputError, match=rf"{VARIABLE}: .* is no URL .*'off' switches") as caught:
        Database(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mssql+pymssql://host/db", r"needs pymssql, which is not installed$"),
        ("postgresql://host/db", r'needs psycopg, .* \(pip install "autotune-train\[postgresql\]"\)'),
        ("postgres://host/db", r'pip install "autotune-train\[postgresql\]"'),
        ("mysql://host/db", r'needs pymysql, .* \(pip install "autotune-train\[mysql\]"\)'),
        ("mariadb://host/db", r'pip install "autotune-train\[mysql\]"'),
    ],
)
def test_a_missing_driver_is_one_line_with_the_remedy(url, said, monkeypatch):
    for name in ("psycopg", "pymysql"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MachineError, match=said) as caught:
        Database(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://host/db", "psycopg"),
        ("postgres://host/db", "psycopg"),
        ("mysql://host/db", "pymysql"),
        ("mariadb://host/db", "pymysql"),
    ],
)
def test_a_url_without_a_driver_has_that_of_our_extras(url, driver):
    pytest.importorskip(driver)
    assert Database(url).url.get_driver_name() == driver


def test_what_the_url_says_itself_counts(monkeypatch):
    pytest.importorskip("psycopg")
    seen = {}
    monkeypatch.setattr(database.sa, "create_engine", lambda url, **options: seen.update(options) or _engine())
    Database("postgresql://host/db?connect_timeout=30")
    assert "connect_timeout" not in seen["connect_args"]
    assert seen["connect_args"]["tcp_user_timeout"] == 10_000


def _engine() -> sa.Engine:
    return importlib.import_module("sqlalchemy.engine").create_engine("sqlite://")


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs"])
def test_a_file_on_a_network_file_system_is_refused_with_what_to_do(kind, monkeypatch, tmp_path):
    table = tmp_path / "mounts"
    table.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/home {tmp_path} {kind} rw 0 0\n")
    monkeypatch.setattr("autotune.storage.home.MOUNTS", table)
    with pytest.raises(InputError, match=rf"network file system \({kind}\).*PostgreSQL.*AUTOTUNE_HOME.*off") as caught:
        Database(f"sqlite:///{tmp_path}/not/made/record.db")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [table]


def test_what_has_happened_is_told_without_guesses(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'record.db'}")
    said = 'connection to server at "db", port 5432 failed: Connection refused\n\tIs the server running on that host?'
    with pytest.raises(RecordError, match=r"Connection refused$"), database.translated():
        raise sa.exc.OperationalError("", {}, Exception(said))


ERRORS = {
    "refused": (sa.exc.OperationalError("", {}, Exception("connection refused")), True),
    "starting": (sa.exc.OperationalError("", {}, Exception("FATAL: the database system is starting up")), True),
    "cut off": (sa.exc.InterfaceError("", {}, Exception("connection closed")), True),
    "in time": (TimeoutError("timed out"), True),
    "password": (sa.exc.OperationalError("", {}, Exception("FATAL: password authentication failed for user")), False),
    "no database": (sa.exc.OperationalError("", {}, Exception("(1049, \"Unknown database 'team'\")")), False),
    "no right": (sa.exc.ProgrammingError("", {}, Exception("permission denied for schema public")), False),
    "a mistake": (sa.exc.ProgrammingError("", {}, Exception("syntax error")), False),
}


@pytest.mark.parametrize(("error", "is_temporary"), ERRORS.values(), ids=ERRORS)
def test_what_may_work_a_minute_later_is_told_from_what_will_not(error, is_temporary, tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'record.db'}")
    database.url = sa.make_url("postgresql+psycopg://host/team")
    with pytest.raises(RecordError) as caught, database.translated():
        raise error
    assert caught.value.is_temporary == is_temporary
