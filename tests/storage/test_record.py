"""The lasting record: an Optuna storage that several write at once, and that never takes a search down.

On a server: `tests/faults/test_postgresql.py`.
"""

import fcntl
import json
import threading
import time
from pathlib import Path

import optuna
import pytest
from factories import OUT_OF_MEMORY, make_config
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from recorded_searches import keep, recorded_search, recorded_trial, stored
from running import run_at_once

from autotune.errors import InputError, RecordError
from autotune.storage import record as module
from autotune.storage.record import RECORD_FILE, RESULT, SEARCH, VARIABLE, Record, record


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "record.journal"


@pytest.fixture(params=["journal", "sqlite"])
def place(request, tmp_path) -> Path | str:
    """A file, or the URL of a database without our tables."""
    return tmp_path / "record.journal" if request.param == "journal" else f"sqlite:///{tmp_path}/record.db"


@pytest.fixture
def either(place) -> Record:
    return Record(place)


def test_what_was_kept_is_read_again_to_the_last_digit(either, place):
    large = recorded_trial(make_config(16), 1 / 3).model_copy(update={"warnings": ("ünïcödé 💾 " * 20_000,)})
    search = recorded_search(large, recorded_trial(make_config(4), OUT_OF_MEMORY), model="modèle 💾")
    keep(either, search)
    assert Record(place).searches() == [search]


def test_a_trial_is_there_once_and_one_that_ran_again_under_its_number_replaces_the_earlier_one(either):
    search = recorded_search(recorded_trial(), recorded_trial())
    for count in (1, 3, 3):
        either.write(search, stored(*search.trials[:count]))
    assert either.searches() == [search]
    again = search.trials[2].model_copy(update={"duration_s": 99.0})
    trials = (*search.trials[:2], again)
    answered = search.model_copy(update={"verdict": "faster", "best_config_id": "x", "trials": trials})
    keep(either, answered)
    assert either.searches() == [answered]
    (name,) = optuna.get_all_study_names(either.storage)
    assert len(optuna.load_study(study_name=name, storage=either.storage).trials) == 3


def test_searches_are_found_by_their_key_the_latest_first_and_forgotten(either):
    mine, other = recorded_search(), recorded_search(id="b", key="another", started="2026-11-19T00:00:00+00:00")
    latest = recorded_search(id="c", started="2026-11-21T00:00:00+00:00")
    keep(either, mine, other, latest)
    assert either.searches() == [latest, mine, other]
    assert either.searches(latest=1) == [latest]
    assert either.searches(key=mine.key) == [latest, mine]
    either.forget([mine, latest])
    assert either.searches() == [other]


WRITER = """
import sys
from pathlib import Path
from recorded_searches import recorded_search, recorded_trial, stored
from autotune.storage.record import Record

searches = [recorded_search(*(recorded_trial() for _ in range(10)), id=name) for name in (sys.argv[2], "ours")]
print("ready", flush=True)
sys.stdin.readline()
database = Record(sys.argv[1] if "://" in sys.argv[1] else Path(sys.argv[1]))
for number in range(11):
    for search in searches:
        database.write(search, stored(*search.trials[: number + 1]))
"""


@pytest.mark.parametrize("place", ["journal"], indirect=True)
def test_processes_write_at_once_the_same_search_too_into_a_record_that_none_has_made(place):
    assert run_at_once(WRITER, str(place), "abc") == [(0, "")] * 3
    found = {search.id: len(search.trials) for search in Record(place).searches()}
    assert found == dict.fromkeys([*"abc", "ours"], 11)


def test_a_line_that_was_cut_short_costs_nothing_else(path):
    search = recorded_search(recorded_trial())
    keep(Record(path), search)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    keep(Record(path), recorded_search(id="b"))
    assert {s.id: len(s.trials) for s in Record(path).searches()} == {"a": 1, "b": 1}
    keep(Record(path), search)
    assert Record(path).searches(latest=1)[0].trials
    assert len(optuna.get_all_study_names(JournalStorage(JournalFileBackend(str(path))))) == 2


def test_a_record_that_another_process_holds_is_waited_for_but_not_for_too_long(path, monkeypatch):
    database = Record(path)
    keep(database, recorded_search())
    with path.open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with monkeypatch.context() as impatient:
            impatient.setattr(module, "PATIENCE_S", 0.1)
            with pytest.raises(RecordError, match=r"record\.journal: can't be used: timed out"):
                keep(database, recorded_search(id="b"))
        writing = threading.Thread(target=keep, args=(database, recorded_search(id="b")))
        writing.start()
        time.sleep(0.1)
        assert len(Record(path).searches()) == 1, "who only reads doesn't wait for a writer"
    writing.join()
    assert len(Record(path).searches()) == 2


@pytest.mark.parametrize(
    "content", [b"this is no journal" * 99, bytes(4096), b'{"op_code": 5}\n' * 3, b"[1]\n", b'{"half": \n{}\n']
)
def test_a_damaged_record_is_one_line_and_left_as_it_is(path, content):
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"record\.journal: can't be used: damaged") as caught:
        keep(Record(path), recorded_search())
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


ODD = {"of a type": "5", "too little": {"id": "a"}, "of an earlier form": {"key": {"model": "m"}}}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_rows_are_passed_over_with_a_warning(either, odd, caplog):
    searches = [recorded_search(id=name) for name in "abc"]
    keep(either, *searches)
    names = sorted(optuna.get_all_study_names(either.storage))
    first, second, _ = (optuna.load_study(study_name=name, storage=either.storage) for name in names)
    row = {**recorded_trial().model_dump(mode="json"), **odd} if isinstance(odd, dict) else odd
    endless = recorded_trial().model_dump_json().replace('"samples_per_second":10.0', '"samples_per_second":Infinity')
    for text in (json.dumps(row), endless):
        first.add_trial(optuna.create_trial(value=1.0, user_attrs={RESULT: text}))
    about = searches[1].model_dump(mode="json", exclude={"trials"})
    second.set_user_attr(SEARCH, odd if odd == ODD["too little"] or odd == "5" else {**about, **odd})
    optuna.create_study(study_name="somebody's", storage=either.storage)
    assert {s.id: len(s.trials) for s in either.searches()} == {"a": 1, "c": 1}
    (warning,) = caplog.messages
    assert "3 searches or trials of the record are passed over: damaged, or of an earlier form" in warning
    keep(either, searches[0])


@pytest.mark.parametrize(
    ("place", "said"), [("nowhere/x", "can't be used"), ("folder", "can.t be used"), ("link", "is a link")]
)
def test_a_place_that_can_not_be_written_is_one_line_and_a_link_is_not_followed(tmp_path, place, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(RecordError, match=f"{place}: {said}"):
        keep(Record(tmp_path / place), recorded_search())
    assert not (tmp_path / "theirs").exists()


class TestWhereItIs:
    def test_by_default_in_the_home_if_that_can_be_written(self, monkeypatch, tmp_path):
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path / "new"))
        database = record()
        assert database.searches() == []
        assert not (tmp_path / "new").exists()
        keep(database, recorded_search())
        assert (tmp_path / "new" / RECORD_FILE).stat().st_mode & 0o777 == 0o600

        (tmp_path / "file").touch()
        monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path / "file"))
        with pytest.raises(RecordError, match=r"can't be written"):
            keep(record(), recorded_search())

    def test_a_url_names_another(self, monkeypatch, tmp_path):
        monkeypatch.setenv(VARIABLE, f"sqlite:///{tmp_path / 'team.db'}")
        keep(record(), recorded_search())
        assert record().where == str(tmp_path / "team.db")

    @pytest.mark.parametrize(
        "url",
        [
            *("/data/record.db", "nosuch://host/db", "sqlite://", "sqlite:///:memory:", "sqlite://ann:s3cr3t@host/db"),
            *("postgresql://ann:s3@cr3t@host/db", "postgresql://ann:s3cr3t", "postgresql://host:s3cr3t/db"),
            "postgresql://ann:s3cr3t@host/db?port=x@y",
        ],
    )
    def test_what_is_no_url_of_a_lasting_database_is_refused_without_what_may_be_a_password(self, monkeypatch, url):
        monkeypatch.setenv(VARIABLE, url)
        with pytest.raises(InputError, match=r"AUTOTUNE_RECORD: no URL .*'off' switches") as caught:
            record()
        assert "\n" not in str(caught.value)
        assert "s3" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["postgresql://ann:s3cr3t@127.0.0.1:1/db", "postgresql://s3cr3t@127.0.0.1:1/db?password=s3cr3t"]
)
def test_a_server_that_is_not_there_is_one_line_without_the_password(url):
    pytest.importorskip("psycopg")
    with pytest.raises(RecordError, match=r"127\.0\.0\.1: can't be used: connection refused") as caught:
        Record(url).searches()
    assert "s3cr3t" not in str(caught.value)
