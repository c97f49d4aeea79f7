"""Units as people write and read them, and texts of others where they leave: terminal, reports, errors."""

import html
import io
import sys
import unicodedata

import pytest
from answers import drawn, report_of
from exporting import GPU, answer_of
from factories import make_config, make_spec, make_workload
from rich.table import Table
from rich.text import Text

from autotune.output.progress import Progress
from autotune.output.report import html_report
from autotune.output.table import text_of
from autotune.output.terminal import Console
from autotune.units import GIB, parse_count, parse_memory, parse_time_s, show_memory, show_rate, show_time, visible
from autotune.values.problem import Note


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        *((parse_memory, *case) for case in (("24GiB", 24 << 30), ("24gib", 24 << 30), ("24GB", 24 * 10**9))),
        *((parse_memory, *case) for case in (("1.5 GB", 1_500_000_000), (" 800MiB ", 800 << 20), ("2TiB", 2 << 40))),
        *((parse_memory, *case) for case in (("1k", 1000), ("4096", 4096))),
        *((parse_time_s, *case) for case in (("90", 90), ("90s", 90), ("1.5m", 90), ("10M", 600), ("1h30m", 5400))),
        *((parse_time_s, *case) for case in (("1h 30m", 5400), ("1d", 86400))),
        *((parse_count, *case) for case in (("20B", 20e9), ("300e9", 300e9), ("1_000_000", 1e6), ("1.5T", 1.5e12))),
        *((parse_count, *case) for case in (("7m", 7e6), ("2 k", 2000), ("5", 5))),
        *((show_memory, *case) for case in ((GIB, "1.00 GiB"), (1.5 * GIB, "1.50 GiB"), (800 << 20, "800 MiB"))),
        *((show_memory, *case) for case in ((0, "0 MiB"), (40_000, "39 KiB"))),
        *((show_time, *case) for case in ((0.4, "0 s"), (89, "89 s"), (90, "1 min 30 s"), (720, "12 min"))),
        *((show_time, *case) for case in ((3599, "59 min 59 s"), (7500, "2 h 05 min"))),
        *((show_rate, *case) for case in ((0.01234, "0.0123"), (9.876, "9.88"), (99.97, "100"), (12345.6, "12,346"))),
    ],
)
def test_units_are_read_and_shown(parse, text, value):
    assert parse(text) == value


NO_MEMORY = ("", "GiB", "0", "24", "0GiB", "-1GiB", "1.GiB", "24 GiB 3", "24GiBs", "1e9", "9" * 400)
NO_TIME = ("", "m", "-5m", "5 parsecs", "1h-5m", "1h30", "30 1h", "0s", "9" * 400)
NO_COUNT = ("", "0", "-5", "B", "20 bananas", "1e999", "nan", "inf", "1e-3")


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        *((parse_memory, text, "expected an amount of memory such as 24GiB") for text in NO_MEMORY),
        *((parse_time_s, text, "expected a time") for text in NO_TIME),
        *((parse_count, text, "expected a number above 0, such as 20B") for text in NO_COUNT),
    ],
)
def test_what_is_no_amount_is_refused_with_an_example(parse, text, said):
    with pytest.raises(ValueError, match=said):
        parse(text)


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


def test_what_can_be_seen_stays_and_the_rest_is_its_escape():
    assert visible("Zoë's model, 模型 🤗 [a] \\n") == "Zoë's model, 模型 🤗 [a] \\n"
    assert visible("a\n\t\x00\x1b\x9b\u2028\u202e\ufeff\ud800") == r"a\n\t\x00\x1b\x9b\u2028\u202e\ufeff\ud800"


def test_no_character_of_control_or_format_is_left():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not {unicodedata.category(c) for c in visible(every)} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize("made", [str, Text], ids=["text", "styled"])
def test_a_console_draws_no_control_character_and_reads_no_markup(made):
    table = Table(title=made(NAME))
    table.add_column("model")
    table.add_row(made(NAME))
    for shown in (drawn(table, 100), drawn(made(NAME), 300)):
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
    for page in (html_report(report_of(result)), result._repr_html_()):
        assert not unseen(page)
        assert "<img" not in page
        assert "\\x1b[2J" in html.unescape(page)
