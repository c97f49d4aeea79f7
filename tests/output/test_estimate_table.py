"""Predicted memory in words; no row of the table of tensors at the peak is lost."""

from answers import drawn
from finished_searches import make_alive, make_breakdown

from autotune.output.estimate_table import MOST_ROWS, alive_table, phases_line
from autotune.values.estimate import Phase


def test_the_table_counts_what_it_leaves_out():
    rows = [make_alive(operator=f"op{at}", allocated_bytes=1 << 30) for at in range(MOST_ROWS + 3)]
    shown = drawn(alive_table(rows), 80)
    assert "3 more" in shown
    assert "3.00" in shown


def test_the_line_of_the_phases_names_the_largest_first_and_says_that_an_evaluation_is_left_out():
    memory = make_breakdown()
    said = phases_line(memory)
    assert said.startswith("the peak is in the phase forward and backward, at mm; allocated at most: ")
    assert "optimizer step 410 MiB" in said
    assert "evaluation" not in said
    more = Phase(name="evaluation", operator="mm", allocated_bytes=2 << 30)
    said = phases_line(memory.model_copy(update={"phases": (*memory.phases, more)}))
    assert said.endswith("evaluation 2.00 GiB; evaluation, which takes more, counts with --eval-batch")
