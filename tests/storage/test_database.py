"""Databases by their URL: which are taken, how, and that a password is never shown, however the URL is garbled."""

import importlib
import itertools
import logging
import sys
from collections import namedtuple

import psutil
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.errors import AutotuneError, InputError, MachineError, RecordError
from autotune.storage import database
from autotune.storage.database import VARIABLE, Database, masked, shown
from autotune.storage.home import home

SECRET = "s3cr3t!"

Mount = namedtuple("Mount", ["mountpoint", "fstype"])

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
    "url",
    [
        "/data/record.db",
        "nosuch://host/db",
        "mysql://host/db",
        "mssql+pymssql://host/db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///",
    ],
)
def test_what_is_no_url_of_a_lasting_database_is_refused(url):
    with pytest.raises(InputError, match=rf"{VARIABLE}: .* is no URL .*'off' switches") as caught:
        Database(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql+pg8000://host/db", r"needs pg8000, which is not installed"),
        ("postgresql://host/db", r'needs psycopg, .* \(pip install "autotune-train\[postgresql\]"\)'),
        ("postgres://host/db", r'pip install "autotune-train\[postgresql\]"'),
    ],
)
def test_a_missing_driver_is_one_line_with_the_remedy(url, said, monkeypatch):
    for name in ("psycopg", "pg8000"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MachineError, match=said) as caught:
        Database(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["postgresql://host/db", "postgres://host/db"])
def test_a_url_without_a_driver_has_that_of_our_extra(url):
    pytest.importorskip("psycopg")
    assert Database(url).url.get_driver_name() == "psycopg"


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
    mounts = [Mount("/", "ext4"), Mount(str(tmp_path), kind)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    with pytest.raises(InputError, match=rf"network file system \({kind}\).*PostgreSQL.*AUTOTUNE_HOME.*off") as caught:
        Database(f"sqlite:///{tmp_path}/not/made/record.db")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


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


GARBLED = (
    "secret",
    "/secret",
    "secret@host",
    "ann:secret@host/team",
    "ann/secret@host:team",
    "://ann:secret@host",
    "secret://ann@host/team",
    "postgresql+secret://ann@host/team",
    "postgresql",
    "postgresql:secret",
    "postgresql:/ann:secret@host/team",
    "postgresql//ann:secret@host/team",
    "postgresql:://ann:secret@host/team",
    "'postgresql://ann:secret@host/team'",
    "jdbc:postgresql://host/team?user=ann&password=secret",
    "host=db user=ann password=secret dbname=team",
    "postgresql://ann:secret",
    "postgresql://ann:secret/team",
    "postgresql://ann:secret?sslmode=require",
    "postgresql://ann:12secret/team",
    "postgresql://:secret",
    "postgresql://ann:pass@secret@127.0.0.1:1/team",
    "postgresql://ann:p@ss/secret@127.0.0.1:1/team",
    "postgresql://ann:pass/secret@127.0.0.1:1/team",
    "postgresql://ann:pass?secret@127.0.0.1:1/team",
    "postgresql://ann:pass#secret@127.0.0.1:1/team",
    "postgresql://ann:pass:secret@127.0.0.1:1/team",
    "postgresql://ann:pass%zzsecret@127.0.0.1:1/team",
    "postgresql://ann: secret @127.0.0.1:1/team",
    "postgresql://ann:pass  secret@127.0.0.1:1/team",
    "postgresql://ann:pass\nsecret@127.0.0.1:1/team",
    "postgresql://secret@127.0.0.1:1/team",
    "postgresql://:secret@127.0.0.1:1/team",
    "postgresql://127.0.0.1:1/team;password=secret",
    "postgresql://127.0.0.1:1/team&password=secret",
    "postgresql://127.0.0.1;password=secret/team",
    "postgresql://127.0.0.1:1/team?password=secret",
    "postgresql://127.0.0.1:1/team?PassWord=secret&sslpassword=secret",
    "postgresql://[ann:secret@127.0.0.1/team",
    "postgresql://ann:secret@[::1/team",
    "postgresql://ann:secret@127.0.0.1:port/team",
    "postgresql://ann:secret@127.0.0.1:99999999/team",
    "mysql://ann:secret@tcp(127.0.0.1:3306)/team",
    "mysql://127.0.0.1:1/team?passwd=secret",
    "mssql+pyodbc:///?odbc_connect=Server=127.0.0.1;PWD=secret",
    "mssql://ann:secret@127.0.0.1/team",
    "sqlite://secret",
    "sqlite://ann:secret@127.0.0.1/x.db",
    "sqlite://:secret@/x.db",
    "sqlite+pysqlcipher://:secret@/x.db",
    "sqlite:///ann:secret@127.0.0.1/team",
    "sqlite:///x.db?password=secret",
    "sqlite:///x.db?secret",
    "sqlite:///x.db?key=secret&cipher=aes",
    "sqlite:///file:x.db?uri=true&password=secret",
    "sqlite:///x.db;password=secret",
    "sqlite:///x.db&password=secret",
    "sqlite:///x.db#pwd=secret",
    "sqlite:x.db?password=secret",
    "sqlite:///x.db%00secret",
    "file:///x.db?password=secret",
)


@pytest.mark.parametrize("url", GARBLED)
def test_a_password_is_never_shown_however_its_url_is_garbled(url, monkeypatch, tmp_path, caplog, recwarn):
    caplog.set_level(logging.DEBUG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, url)
    for words in (["history"], ["history", "--json"], ["history", "export", "out.json"], ["history", "sync", "runs"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code in (0, 2, 3), done.output
        assert "secret" not in done.output + str(done.exception)
    assert "secret" not in caplog.text + "".join(str(warning.message) for warning in recwarn)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


@pytest.mark.parametrize("url", GARBLED)
def test_an_error_says_nothing_of_it_with_its_traceback_either(url, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, url)
    error = CliRunner().invoke(app, ["history", "--debug"]).exception
    while error is not None:
        assert "secret" not in str(error)
        error = error.__cause__ if error.__suppress_context__ else error.__context__


# In the order of a URL, each with what can be forgotten or mistaken.
PARTS = (
    ("postgresql+psycopg://", "postgresql+psycopg2://", "postgresql://"),
    ("", "ann:", "ann", ":", "ann:pass@", "a@b:"),
    ("secret",),
    ("", "@", "@127.0.0.1", "@127.0.0.1:1", ":1", "@@", "/@127.0.0.1", "%40", ";", " "),
    ("", "/", "/team", "/team?password=secret", "?secret=secret"),
)


def test_of_what_reads_as_a_url_no_password_is_shown(tmp_path):
    """Drivers say again what they were given; whether they are installed doesn't matter."""
    read = 0
    for parts in itertools.product(*PARTS):
        try:
            url = sa.make_url("".join(parts))
        except (sa.exc.ArgumentError, ValueError):
            continue
        if "secret" in f"{url.host}{url.database}":
            continue  # it stands where a host or a database is named
        read += 1
        database = Database(f"sqlite:///{tmp_path / 'record.db'}")
        database.url = url
        with pytest.raises(RecordError) as caught, database.translated():
            raise OSError(f"no such: {url.username}, {url.password}, {list(url.query.values())}" + " long" * 99)
        assert "secret" not in f"{caught.value} {shown(url)}", "".join(parts)
    assert read > 100


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://ann:pass@db.example.org:5433/team", "postgresql://db.example.org:5433/team"),
        ("postgresql://ann:12345", "postgresql://ann"),
        ("postgresql://[::1]/team", "postgresql://::1/team"),
        ("postgresql:///team", "postgresql:///team"),
        ("postgresql://host/team;x=1", "postgresql://host/***"),
    ],
)
def test_what_is_shown_of_a_server(url, expected):
    assert shown(sa.make_url(url)) == expected


def test_a_number_that_is_no_port_is_masked():
    assert masked('connection to "ann", port 12345', sa.make_url("postgresql://ann:12345")) == (
        'connection to "ann", port ***'
    )


def test_a_password_is_masked_before_a_message_is_cut_short(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'record.db'}")
    database.url = sa.make_url("postgresql+psycopg://ann:secret-and-long@host/team")
    for length in range(130, 165):
        with pytest.raises(RecordError) as caught, database.translated():
            raise OSError("x" * length + "secret-and-long")
        assert "s" not in str(caught.value).partition("used: ")[2]


@pytest.mark.parametrize("url", ["sqlite:///x.db?uri=true&mode=rwc", "sqlite:////data/team@home/record.db"])
def test_what_is_a_url_stays_one(url, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Database(url).file is not None


def test_a_database_named_in_place_of_a_home_is_refused(monkeypatch):
    monkeypatch.setenv("AUTOTUNE_HOME", "postgresql://ann:secret@host/team")
    with pytest.raises(AutotuneError, match=f"AUTOTUNE_HOME.*{VARIABLE}") as caught:
        home()
    assert "secret" not in str(caught.value)
