"""Predicted memory, drawn: bars that add up; what is alive is as wide as its bytes, and no row of the table is lost."""

from io import StringIO

from finished_searches import make_alive, make_breakdown, make_report
from rich.console import Console

from autotune.output.drawing import styled
from autotune.output.memory import MOST_ROWS, alive_table, icicle, memory_bars, memory_parts, phases_line
from autotune.units import GIB
from autotune.values.estimate import Phase
from autotune.values.result import Breakdown


def row(kind: str = "activations", module: str = "model.layers.*.mlp", operator: str = "mm", size: int = 1 << 30):
    return make_alive(kind=kind, module=module, operator=operator, allocated_bytes=size)


def drawn(rows, width: float) -> dict[str, tuple[float, int]]:
    """Widths and levels of an icicle's columns, by name."""
    with styled("light"):
        bars = icicle(rows, width).axes[0].patches
    return {b.get_gid().removeprefix("tip:").split("\n")[0]: (b.get_width(), round(b.get_y())) for b in bars}


def test_columns_are_as_wide_as_their_bytes():
    found = drawn([row(size=3 << 30), row("weights", "lm_head", "parameter")], 402)
    assert found == {
        "activations model layers* mlp mm": (3 << 30, 0),
        "weights lm_head parameter": (1 << 30, 0),
    }


def test_what_is_inside_of_a_module_is_below_it():
    found = drawn([row(operator="mm"), row(operator="gelu"), row(module="model.layers.*.attention")], 302)
    assert found["activations model layers*"] == (3 << 30, 0)
    assert found["mlp"] == (2 << 30, 1)
    assert found["gelu"] == (1 << 30, 2)


def test_nothing_is_drawn_of_nothing():
    assert icicle([], 300) is None


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


def test_components_come_to_the_peak():
    memory = make_breakdown()
    parts = memory_parts(memory, on_cpu=True)
    assert sum(parts.values()) == memory.device_peak_bytes
    assert list(parts)[-1] == "beyond the tensors"
    assert parts["communication"] == 0
    assert list(memory_parts(memory, on_cpu=False))[-1] == "context, allocator"


def test_a_correction_below_the_sum_leaves_nothing_beyond():
    parts = memory_parts(make_breakdown(device_peak_bytes=GIB // 2), on_cpu=True)
    there = ["weights", "gradients", "optimizer states", "activations", "temporaries"]
    assert [name for name, size in parts.items() if size] == there


def test_stacks_share_one_scale_and_the_measured_peak_is_on_it(tmp_path):
    found = (
        Breakdown(name="baseline", predicted=make_breakdown(), measured_bytes=GIB),
        Breakdown(name="best", predicted=make_breakdown(activations_bytes=0), measured_bytes=None),
    )
    report = make_report(tmp_path / "run").model_copy(update={"breakdowns": found})
    with styled("light"):
        axes = memory_bars(report, 620.0).axes[0]
    weights = [bar.get_width() for bar in axes.patches if ": weights " in bar.get_gid()]
    assert len(weights) == 2
    assert weights[0] == weights[1]
    (measured,) = [line for line in axes.lines if "measured" in line.get_gid()]
    assert list(measured.get_xdata()) == [GIB]
