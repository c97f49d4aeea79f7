"""Tables at the width there is: words stay whole."""

import io

from rich.console import Console
from rich.table import Table

from autotune.output.terminal import Fitted

ROWS = [
    ("baseline", "12.3 (11.9 to 12.8)", "micro-batch 8, fp32, adamw_torch_fused"),
    ("best", "45.6 (44.0 to 47.1)", "precision bf16, gradient checkpointing full, attention sdpa"),
]
WORDS = {word for row in ROWS for cell in row for word in cell.split()}


def table(**options) -> Table:
    made = Table(title="what was found", title_justify="left", **options)
    for heading, justify in (("", "left"), ("samples/s", "right"), ("what changes", "left")):
        made.add_column(heading, justify=justify, overflow="fold")
    for row in ROWS:
        made.add_row(*row)
    return made


def drawn(width: int, made: Table | None = None) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(Fitted(made or table()))
    return console.file.getvalue()


def test_no_word_is_broken_and_nothing_is_left_out_at_any_width():
    for width in range(20, 140, 4):
        text = drawn(width)
        assert max(map(len, text.splitlines())) <= width
        assert set(text.replace("│", " ").split()) >= WORDS | {"samples/s", "changes"}


def test_it_stands_side_by_side_as_long_as_it_can():
    assert "│" in drawn(44)
    narrow = drawn(36)
    assert "│" not in narrow
    assert [line.rstrip() for line in narrow.splitlines()[:5]] == [
        "what was found",
        "baseline",
        "  samples/s 12.3 (11.9 to 12.8) ·",
        "  what changes micro-batch 8, fp32,",
        "  adamw_torch_fused",
    ]


def test_one_table_can_be_drawn_at_several_widths():
    made = table()
    assert [drawn(width, made) for width in (60, 140, 30, 60)] == [drawn(width) for width in (60, 140, 30, 60)]


def test_columns_that_must_not_wrap_are_not_wrapped():
    made = Table()
    made.add_column("device", no_wrap=True)
    made.add_column("what it is")
    made.add_row("NVIDIA H100 PCIe", "a GPU")
    for width in range(24, 60, 4):
        assert "NVIDIA H100 PCIe" in drawn(width, made)


def test_cells_that_say_nothing_take_no_line():
    made = Table()
    for heading in ("name", "first\nfigure", "second"):
        made.add_column(heading, no_wrap=True)
    made.add_row("something with a name", "", "2")
    made.add_row("7", "1", "")
    assert [line.strip() for line in drawn(20, made).splitlines()] == [
        "something with a",
        "name",
        "second 2",
        "name 7",
        "first figure 1",
    ]
