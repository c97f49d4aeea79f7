"""The page: complete, of one piece, and whatever a text holds, it stays a text."""

import html
import html.parser
import re

import pytest
from finished_searches import make_breakdown, make_report, nothing_helps

from autotune.output.report import answer, explained, html_report, memory_parts, state
from autotune.units import GIB
from autotune.values.time_spent import Spent
from autotune.values.trial import TrialStatus


class Page(html.parser.HTMLParser):
    """A page as a browser takes it: ids, elements, what it would load."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.rows = 0
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.loaded += [found[name] for name in ("src", "href") if name in found]
        self.rows += "data-kind" in found

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return make_report(tmp_path_factory.mktemp("search") / "run")


@pytest.fixture(scope="module")
def text(report):
    return html_report(report)


def test_the_page_is_complete_of_one_piece_and_small(report, text):
    page = Page(text)
    parts = {"against", "factors", "pareto", "progress", "memory", "time"}
    assert {*parts, "trials", "machine", "again"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "allocated, optimizer step" in text
    assert page.tags.count("figure") == page.tags.count("svg") == 3
    assert len(text) < 200_000
    assert page.loaded == ["data:,"]
    assert not re.search(r"https?:|url\((?!#)|@import|fetch\(|XMLHttpRequest", text)


def test_every_trial_and_every_refusal_is_a_row(report, text):
    assert Page(text).rows == len(report.trials)
    for trial in report.trials:
        if trial.status is TrialStatus.REJECTED:
            assert html.escape(trial.cause) in text


def test_a_search_without_an_answer_has_a_page(report):
    failed = tuple(t for t in report.trials if t.status is TrialStatus.OUT_OF_MEMORY)
    without = {"result": None, "explanation": None, "nothing": "nothing fits 8 GiB"}
    nothing = report.model_copy(update={**without, "trials": failed})
    text = html_report(nothing)
    page = Page(text)
    assert "No answer: nothing fits 8 GiB." in text
    assert "against" not in page.ids
    assert page.rows == len(failed) > 0
    assert Page(html_report(nothing.model_copy(update={"trials": (), "breakdowns": ()}))).rows == 0


def test_a_baseline_that_won_says_there_is_nothing_to_explain(tmp_path):
    report = make_report(tmp_path / "run", nothing_helps)
    text = html_report(report)
    assert "faster than your baseline by more than" in text
    assert "there is no knob to explain" in text
    assert re.findall(r"<td[^>]*>(winner|baseline|runner-up) ?\*?</td>", text) == ["baseline"]
    Page(text)


def test_the_answer_is_a_sentence_and_what_was_not_run_in_turn_says_how_to_get_it(report):
    assert answer(report).startswith("1.98 x as fast as your baseline (1.9")
    assert answer(report).endswith(" x): micro-batch 16, precision bf16, optim adamw_torch.")
    assert f"`autotune explain {report.run_directory}` measures it" in explained(report)


def test_the_state_says_what_ran(report):
    ran = sum(t.purpose is not None for t in report.trials)
    refused = len(report.trials) - ran
    assert state(report).startswith(f"{ran} trials in ")
    assert f"{refused} configurations refused without one" in state(report)
    assert "2 running" in state(report.model_copy(update={"is_running": True, "unfinished": 2}))
    assert "2 begun and not finished" in state(report.model_copy(update={"unfinished": 2}))


def test_baseline_and_winner_have_the_share_of_the_device_that_they_use_by_the_measured_rate(text):
    found = re.search(r"winner .* tokens/s, (\d+)% MFU; baseline .* tokens/s, (\d+)% MFU", text)
    assert found is not None
    assert found.groups() == ("20", "10")


def test_the_longest_kind_of_work_comes_first(report):
    parts = ("first_steps_s", "warm_up_s", "measured_s", "checks_s", "trials_overhead_s", "lost_s", "own_s")
    nothing = Spent(**dict.fromkeys(parts, 0.0))
    spent = nothing.model_copy(update={"first_steps_s": 10.0, "measured_s": 30.0, "trials_overhead_s": 5.0})
    text = html_report(report.model_copy(update={"spent": spent})).partition('<section id="time">')[2]
    assert re.findall(r"<td>(\d+%)</td>", text.partition("</section>")[0]) == ["67%", "22%", "11%"]
    assert '<section id="time">' not in html_report(report.model_copy(update={"spent": nothing}))


def test_components_come_to_the_peak_and_a_correction_below_their_sum_leaves_nothing_beyond():
    memory = make_breakdown()
    parts = memory_parts(memory, on_cpu=True)
    assert sum(parts.values()) == memory.device_peak_bytes
    assert (list(parts)[-1], parts["communication"]) == ("beyond the tensors", 0)
    assert list(memory_parts(memory, on_cpu=False))[-1] == "context, allocator"
    assert memory_parts(make_breakdown(device_peak_bytes=GIB // 2), on_cpu=True)["beyond the tensors"] == 0
