"""Units as people write and read them, and texts of others where they leave: terminal, reports, errors."""

import html
import io
import sys
import unicodedata

import pytest
from exporting import GPU, answer_of
from factories import make_config, make_spec, make_workload
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.output.progress import Progress
from autotune.output.report import html_of, html_report, report_of, text_of
from autotune.output.terminal import Console, Fitted
from autotune.units import GIB, parse_count, parse_memory, parse_time_s, show_memory, show_rate, show_time, visible
from autotune.values.problem import Note


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24GiB", 24 << 30),
        ("24gib", 24 << 30),
        ("24GB", 24 * 10**9),
        ("1.5 GB", 1_500_000_000),
        (" 800MiB ", 800 << 20),
        ("2TiB", 2 << 40),
        ("1k", 1000),
        ("4096", 4096),
    ],
)
def test_memory_is_read_in_binary_and_decimal_units(text, value):
    assert parse_memory(text) == value


@pytest.mark.parametrize(
    "text", ["", "GiB", "0", "24", "0GiB", "-1GiB", "1.GiB", "24 GiB 3", "24GiBs", "1e9", "9" * 400]
)
def test_what_is_no_memory_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="expected an amount of memory such as 24GiB"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("10M", 600), ("1h30m", 5400), ("1h 30m", 5400), ("1d", 86400)],
)
def test_a_time_is_a_sum_of_parts_and_seconds_without_a_unit(text, seconds):
    assert parse_time_s(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5m", "5 parsecs", "1h-5m", "1h30", "30 1h", "0s", "9" * 400])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="expected a time"):
        parse_time_s(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("20B", 20e9), ("300e9", 300e9), ("1_000_000", 1e6), ("1.5T", 1.5e12), ("7m", 7e6), ("2 k", 2000), ("5", 5)],
)
def test_a_count_has_a_unit_or_an_exponent(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-5", "B", "20 bananas", "1e999", "nan", "inf", "1e-3"])
def test_what_is_no_count_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="expected a number above 0, such as 20B"):
        parse_count(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(GIB, "1.00 GiB"), (1.5 * GIB, "1.50 GiB"), (800 << 20, "800 MiB"), (0, "0 MiB"), (40_000, "39 KiB")],
)
def test_memory_is_shown_in_gib_and_below_that_in_mib(value, text):
    assert show_memory(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (89, "89 s"),
        (90, "1 min 30 s"),
        (285, "4 min 45 s"),
        (720, "12 min"),
        (3599, "59 min 59 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_a_duration_is_shown_in_the_largest_unit_that_says_enough(seconds, text):
    assert show_time(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (9.876, "9.88"), (99.97, "100"), (123.4, "123"), (12345.6, "12,346")]
)
def test_a_rate_has_three_digits_or_is_whole(value, text):
    assert show_rate(value) == text


def test_what_is_shown_can_be_read_again():
    assert parse_memory(show_memory(6.25 * GIB)) == 6.25 * GIB


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


def test_pages_show_what_can_not_be_seen(result):
    for page in (html_report(report_of(result)), html_of(result)):
        assert not unseen(page)
        assert "<img" not in page
        assert "\\x1b[2J" in html.unescape(page.replace("<wbr>", ""))


def test_an_error_about_a_name_is_a_line_without_control_characters(tmp_path):
    done = CliRunner().invoke(app, ["export", str(tmp_path / "a\x1b[2J\n\u202eb.json")])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.strip().isprintable()
