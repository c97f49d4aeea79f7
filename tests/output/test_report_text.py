"""Markdown that stays a table, and CSV that a program can read."""

import csv
import io
import json

import pytest
from finished_searches import BEST, make_report

from autotune.output.report_facts import answer, explained, state
from autotune.output.report_text import csv_report, markdown_report
from autotune.values.trial import TrialStatus


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return make_report(tmp_path_factory.mktemp("search") / "run")


def test_the_answer_is_a_sentence(report):
    assert answer(report).startswith("1.98 x as fast as your baseline (1.9")
    assert answer(report).endswith(" x): micro-batch 16, precision bf16, optim adamw_torch.")


def test_every_row_of_a_table_has_as_many_cells_as_its_heading(report):
    awkward = tuple(t.model_copy(update={"cause": "a | b\nc <i>"}) for t in report.trials)
    text = markdown_report(report.model_copy(update={"trials": awkward}))
    blocks = [b.splitlines() for b in text.split("\n\n") if b.startswith("| ")]
    assert len(blocks) >= 6
    for block in blocks:
        assert len({row.replace("\\|", "").count("|") for row in block}) == 1
    assert "a \\| b c &lt;i>" in text


def test_all_of_the_page_is_in_the_text(report):
    text = markdown_report(report)
    for heading in (
        "Baseline against winner", "What each knob brought", "Predicted against measured", "Where the memory goes",
        "Where the time went", "All trials", "Machine and versions", "To reproduce it",
    ):  # fmt: skip
        assert f"## {heading}" in text


def test_the_measured_arguments_are_there_to_take(report):
    written = markdown_report(report).partition("```json\n")[2].partition("\n```")[0]
    assert json.loads(written) == report.result.arguments.training_arguments


def test_what_was_not_run_in_turn_says_how_to_get_it(report):
    assert f"`autotune explain {report.run_directory}` measures it" in explained(report)


def test_the_state_says_what_ran(report):
    ran = sum(t.purpose is not None for t in report.trials)
    refused = len(report.trials) - ran
    assert state(report).startswith(f"{ran} trials in ")
    assert f"{refused} configurations refused without one" in state(report)
    assert "2 running" in state(report.model_copy(update={"is_running": True, "unfinished": 2}))
    assert "2 begun and not finished" in state(report.model_copy(update={"unfinished": 2}))


def test_csv_has_a_line_for_each_trial_and_a_column_for_each_knob(report):
    rows = list(csv.DictReader(io.StringIO(csv_report(report))))
    assert len(rows) == len(report.trials)
    best = next(r for r in rows if r["config_id"] == BEST.config_id and r["purpose"] == "search")
    assert (best["precision"], best["optim"], best["per_device_train_batch_size"]) == ("bf16", "adamw_torch", "16")
    assert float(best["samples_per_second"]) == pytest.approx(19.8)
    assert int(best["peak_bytes"]) == 2 << 30
    assert best["parallelism.world_size"] == "1"
    refused = [r for r in rows if r["status"] == TrialStatus.REJECTED]
    assert all(r["cause"] and not r["samples_per_second"] for r in refused)
