"""Predicted memory in words; no row of the table of tensors at the peak is lost."""

from io import StringIO

from finished_searches import make_alive, make_breakdown
from rich.console import Console

from autotune.output.estimate_table import MOST_ROWS, alive_table, phases_line
from autotune.values.estimate import Phase


def row(kind: str = "activations", module: str = "model.layers.*.mlp", operator: str = "mm", size: int = 1 << 30):
    return make_alive(kind=kind, module=module, operator=operator, allocated_bytes=size)


def test_the_table_counts_what_it_leaves_out():
    console = Console(width=80, file=StringIO())
    console.print(alive_table([row(operator=f"op{at}") for at in range(MOST_ROWS + 3)]))
    shown = console.file.getvalue()
    assert "3 more" in shown
    assert "3.00" in shown


def test_the_line_of_the_phases_names_the_largest_first():
    said = phases_line(make_breakdown())
    assert said.startswith("the peak is in the phase forward and backward, at mm; allocated at most: ")
    assert "optimizer step 410 MiB" in said


def test_an_evaluation_that_takes_more_is_said_to_be_left_out():
    more = Phase(name="evaluation", operator="mm", allocated_bytes=2 << 30)
    memory = make_breakdown()
    assert "evaluation" not in phases_line(memory)
    said = phases_line(memory.model_copy(update={"phases": (*memory.phases, more)}))
    assert said.endswith("evaluation 2.00 GiB; evaluation, which takes more, counts with --eval-batch")
