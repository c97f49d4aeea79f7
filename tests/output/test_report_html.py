"""The page: complete, of one piece, and whatever a text holds, it stays a text."""

import html
import html.parser
import re

import pytest
from factories import make_spec, make_workload
from finished_searches import make_report, nothing_helps

from autotune.output.report_html import breakable, html_report, with_code
from autotune.values.trial import TrialStatus

EVIL = '<script>alert("x")</script>&{{ 7 * 7 }}'


class Page(html.parser.HTMLParser):
    """A page as a browser takes it: ids, texts by element, what it would load."""

    VOID = frozenset({"meta", "link", "input", "wbr"})

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


def test_the_page_has_the_phases(report):
    assert "allocated, optimizer step" in html_report(report)


def test_the_page_has_all_its_parts(report):
    page = Page(html_report(report))
    parts = {"against", "waterfall", "pareto", "progress", "predicted", "memory", "time"}
    assert {*parts, "trials", "machine", "again"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_every_trial_and_every_refusal_is_a_row(report):
    text = html_report(report)
    assert Page(text).rows == len(report.trials)
    for trial in report.trials:
        if trial.status is TrialStatus.REJECTED:
            assert html.escape(trial.cause) in text


def test_nothing_is_loaded_from_anywhere(report):
    text = html_report(report)
    assert Page(text).loaded == ["data:,"]
    assert not re.search(r"https?:|url\((?!#)|@import|fetch\(|XMLHttpRequest", text)


def test_texts_stay_texts(report):
    workload = make_workload(model=make_spec(name=EVIL, reference=EVIL))
    trials = tuple(t.model_copy(update={"cause": EVIL}) for t in report.trials)
    hardware = report.hardware.model_copy(update={"name": EVIL})
    changed = report.model_copy(
        update={"workload": workload, "trials": trials, "hardware": hardware, "run_directory": EVIL, "command": EVIL}
    )
    text = html_report(changed)
    assert Page(text).tags.count("script") == 1
    assert "alert(" in text
    assert "<script>alert" not in text
    assert "&{49}" not in text.replace("&amp;", "&")


def test_both_widths_are_drawn(report):
    text = html_report(report)
    assert text.count('class="wide"') == text.count('class="narrow"') == 3


def test_a_search_without_an_answer_has_a_page(report):
    failed = tuple(t for t in report.trials if t.status is TrialStatus.OUT_OF_MEMORY)
    nothing = report.model_copy(
        update={"result": None, "explanation": None, "nothing": "nothing fits 8 GiB", "trials": failed}
    )
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
    assert '<th scope="col">baseline = winner</th></tr>' in text
    Page(text)


def test_a_page_is_small(report):
    assert len(html_report(report)) < 200_000


def test_commands_are_code_and_stay_texts():
    assert with_code("a `b <c>` <d>") == "a <code>b &lt;c&gt;</code> &lt;d&gt;"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("a few short words", "a few short words"),
        ("adamw_torch_fused, sdpa", "adamw_<wbr>torch_<wbr>fused, sdpa"),
        ("x" * 30, "xxxxxxxxxxxxxx<wbr>xxxxxxxxxxxxxx<wbr>xx"),
        ("a<b>=</b>&amp;<i>c</i>", "a&lt;b&gt;=<wbr>&lt;/<wbr>b&gt;&amp;amp;&lt;i&gt;c&lt;/<wbr>i&gt;"),
    ],
)
def test_long_words_may_be_broken_and_stay_texts(words, found):
    assert breakable(words) == found
