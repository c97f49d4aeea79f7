"""Texts of others, where they leave: on a terminal, in a report, in the messages of errors."""

import html
import io
import re
import sys
import unicodedata

import pytest
from exporting import GPU, answer_of
from factories import make_config, make_spec, make_workload
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.output.notebook import html_of, report_of, text_of
from autotune.output.progress import Progress
from autotune.output.report_html import html_report
from autotune.output.report_text import csv_report, markdown_report
from autotune.output.terminal import Console, Fitted
from autotune.units import visible
from autotune.values.events import Note

NAME = "m\nRUN touch PWNED\n# \x1b[2J\x07\x9b\u202e\u2028<img src=x onerror=alert(1)>[/x][red]:smile:![a](http://b)`c`"


@pytest.fixture
def result():
    """An answer about a model, a device and a file of that name, of which much is told."""
    workload = make_workload(model=make_spec(name=NAME, reference=NAME), dataset=NAME, text_field=NAME)
    hardware = GPU.model_copy(update={"name": NAME, "driver": NAME})
    found = answer_of(make_config(4, attn_implementation=NAME.replace("/", "|")), workload=workload, hardware=hardware)
    trials = tuple(trial.model_copy(update={"cause": NAME}) for trial in found.trials)
    return found.model_copy(update={"notes": (NAME,), "proof_notes": (NAME,), "outshone": NAME, "trials": trials})


def unseen(text: str) -> set[str]:
    return {c for c in text if not c.isprintable()} - {"\n"}


def drawn(renderable, width=100) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(renderable, highlight=False)
    return file.getvalue()


def test_what_can_be_seen_stays_and_the_rest_is_its_escape():
    assert visible("Zoë's model, 模型 🤗 [a] \\n") == "Zoë's model, 模型 🤗 [a] \\n"
    assert visible("a\n\t\x00\x1b\x9b\u2028\u202e\ufeff\ud800") == r"a\n\t\x00\x1b\x9b\u2028\u202e\ufeff\ud800"


def test_no_character_of_control_or_format_is_left():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    kinds = {unicodedata.category(c) for c in visible(every)}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize("made", [str, Text], ids=["text", "styled"])
def test_a_console_draws_no_control_character_and_reads_no_markup(made):
    table = Table(title=made(NAME))
    table.add_column("model")
    table.add_row(made(NAME))
    for shown in (drawn(table), drawn(Fitted(table)), drawn(made(NAME), 300)):
        assert not unseen(shown)
        assert "\\x1b" in shown
    assert "[/x][red]:smile:" in drawn(made(NAME), 300)


def test_an_answer_says_each_thing_on_its_line(result):
    lines = text_of(result).splitlines()
    assert not unseen("".join(lines))
    assert not [line for line in lines if line.startswith("RUN")]


def test_progress_of_a_search_is_a_line_an_event():
    file = io.StringIO()
    with Progress(Console(file=file, width=100, color_system=None)) as progress:
        progress(Note(text=NAME))
    assert file.getvalue() == visible(NAME) + "\n"


def test_a_markdown_report_has_neither_html_nor_links_nor_lines_of_others(result):
    text = markdown_report(report_of(result))
    assert not unseen(text)
    heading, *lines = text.splitlines()
    assert heading.startswith("# m")
    assert not [line for line in lines if line.startswith("RUN")]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert "<img" not in prose
    assert not re.search(r"(?<!\\)\[a(?<!\\)\]", prose)


def test_pages_show_what_can_not_be_seen(result):
    for page in (html_report(report_of(result)), html_of(result)):
        assert not unseen(page)
        assert "<img" not in page
        assert "\\x1b[2J" in html.unescape(page.replace("<wbr>", ""))


def test_a_table_of_trials_shows_it_too(result):
    text = csv_report(report_of(result))
    assert not unseen(text)
    assert visible(NAME) in text


def test_an_error_about_a_name_is_a_line_without_control_characters(tmp_path):
    done = CliRunner().invoke(app, ["export", str(tmp_path / "a\x1b[2J\n\u202eb.json")])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.strip().isprintable()
