"""What a notebook shows of an answer: complete, confined to its own box, and whatever a text holds, it stays a text."""

import html.parser
import re

import pytest
from factories import make_spec, make_workload
from finished_searches import BEST, make_search, nothing_helps, without_memory

from autotune.output.report_facts import answer
from autotune.output.report_html import SCOPE, html_of, report_of

EVIL = '<script>alert("x")</script>&{{ 7 * 7 }}'


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return make_search(tmp_path_factory.mktemp("search") / "run", without_memory)[1]


class Fragment(html.parser.HTMLParser):
    """A fragment as a browser takes it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href")]
        if tag != "wbr":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def test_it_shows_the_answer_the_sides_and_what_changes(result):
    shown = Fragment(result._repr_html_())
    assert answer(report_of(result)) in shown.text
    for words in ("baseline", "winner", "throughput, samples/s", "peak memory", "precision", "bf16", "micro-batch"):
        assert words in shown.text
    assert shown.tags.count("table") == 2
    assert shown.tags[0] == "div"


def test_it_draws_throughput_against_memory(result):
    shown = Fragment(html_of(result))
    assert shown.tags.count("figure") == 1
    assert "Throughput against memory" in shown.text
    assert "ran out of memory" in shown.text


def test_it_needs_nothing_else_and_runs_nothing(result):
    shown = Fragment(html_of(result))
    assert "script" not in shown.tags
    assert shown.loaded == []
    assert "@import" not in html_of(result)


def test_no_style_reaches_beyond_it(result):
    sheet = re.search(r"<style>(.*?)</style>", html_of(result), re.DOTALL)[1]
    rules = re.sub(r"@media[^{]*{(.*)}\s*$", r"\1", sheet, flags=re.MULTILINE)
    selectors = [part for rule in re.findall(r"([^{}]+){[^{}]*}", rules) for part in rule.split(",")]
    assert len(selectors) > 20
    assert [s.strip() for s in selectors if SCOPE not in s] == []


def test_it_follows_the_theme_of_the_notebook_before_the_systems(result):
    sheet = html_of(result)
    system, light, dark = (
        sheet.index(words) for words in ("@media (prefers-color-scheme: dark)", "jp-theme-light=", "vscode-dark")
    )
    assert system < light < dark
    assert '[data-jp-theme-light="false"]' in sheet


def test_texts_are_escaped(result):
    spec = make_spec(name=EVIL, reference=EVIL)
    evil = result.model_copy(update={"workload": make_workload(model=spec), "notes": (EVIL,)})
    shown = Fragment(html_of(evil))
    assert "script" not in shown.tags
    assert shown.text.count("alert") >= 2
    assert "{{ 7 * 7 }}" in shown.text


def test_a_search_that_found_nothing_better(tmp_path):
    _, result = make_search(tmp_path / "run", nothing_helps)
    shown = Fragment(html_of(result))
    assert "baseline = winner" in shown.text
    assert "isn't faster than your baseline by more than" in shown.text
    assert "knob" not in shown.text
    assert result.best.config != BEST
