"""What must hold of a search whatever has happened: nothing is lost, nothing is measured twice, files are whole."""

import json
from collections import Counter

import optuna
from faults.replaying import LAUNCHES, Search, said
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from autotune.execution.job import marked
from autotune.execution.launch import MARK_FILE
from autotune.execution.outcome import outcome_file
from autotune.storage.record import Record
from autotune.storage.run_directory import ANSWER_FILE, PLAN_FILE, STUDY_FILE, RunDirectory, read_plan, read_result
from autotune.values.trial import Purpose, TrialResult

RECORDED = (Purpose.BASELINE, Purpose.SEARCH, Purpose.FINAL)


class Kept:
    """What a search has finished so far, looked at after each fault."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self.finished: dict[int, bytes] = {}
        self._measured: set[int] = set()  # whose processes had written a measurement, if nothing else had
        self._launches = 0  # lines of the trials that were begun until the latest look

    def look(self) -> dict[int, TrialResult]:
        """Compare with the latest look, and return all finished trials by number."""
        run = self._search.run
        begun = self._begun()
        again = {number for number, _, _ in begun[self._launches :]} & (self.finished.keys() | self._measured)
        assert not again, f"trials {again} had finished, and were run again"
        self._launches = len(begun)
        outcomes = {int(path.parent.name): path.read_bytes() for path in run.glob(f"trials/*/{outcome_file()}")}
        self._measured = {number for number, found in outcomes.items() if json.loads(found)["kind"] == "measurement"}
        content = {int(path.parent.name): path.read_bytes() for path in sorted(run.glob("trials/*/result.json"))}
        lost = {number for number, was in self.finished.items() if content.get(number) != was}
        assert not lost, f"trials {lost} had finished, and are lost or others now"
        self.finished = content
        results = {number: TrialResult.model_validate_json(written) for number, written in content.items()}
        explored = Counter(r.request.config.config_id for r in results.values() if r.request.purpose.explores)
        assert explored.total() == len(explored), "a configuration was searched twice"
        self._check_files()
        assert not RunDirectory(run).is_running(), "the lock is held"
        marks = [json.loads(path.read_text())["mark"] for path in run.glob(MARK_FILE)]
        assert [pid for mark in marks for pid in marked(mark)] == [], "processes that it has started still run"
        return results

    def check_end(self) -> None:
        """Check what a search that has come to its end leaves behind."""
        results, run = self.look(), self._search.run
        assert read_result(run / ANSWER_FILE).verdict
        assert list(run.rglob(".*")) == [], "temporary files have stayed"
        wanted = sorted(n for n, r in results.items() if r.request.purpose in RECORDED and r.request.task is None)
        study = optuna.load_study(study_name=None, storage=JournalStorage(JournalFileBackend(str(run / STUDY_FILE))))
        assert sorted(trial.user_attrs["trial"] for trial in study.trials) == wanted
        if self._search.server or self._search.record.exists():
            own = [search for search in self._search.recorded() if search.run_directory == str(run)]
            assert [[trial.request.number for trial in search.trials] for search in own] == [wanted], said(self._search)
            assert own[0].verdict is not None

    def _begun(self) -> list[tuple[int, str, str]]:
        path = self._search.run / LAUNCHES
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def _check_files(self) -> None:
        run, record = self._search.run, self._search.record
        if (run / PLAN_FILE).exists():
            read_plan(run)
        if (run / ANSWER_FILE).exists():
            read_result(run / ANSWER_FILE)
        for path in [*run.rglob("*.json"), *self._search.home.rglob("*.json")]:
            if not path.name.startswith("."):
                json.loads(path.read_bytes())
        if record.exists():
            self._search.recorded()
        if (run / STUDY_FILE).exists():
            Record(run / STUDY_FILE).searches()
