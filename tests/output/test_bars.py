"""Charts of bars: a waterfall that starts at the baseline and ends at the winner, memory that adds up."""

import itertools
import math
import xml.etree.ElementTree as ET

import pytest
from factories import make_config
from factories import make_contribution as part
from finished_searches import make_breakdown, make_report

from autotune.output.bars import memory_bars, memory_parts, time_bars, waterfall, waterfall_steps
from autotune.units import GIB
from autotune.values.result import Breakdown, Contribution, Explanation
from autotune.values.time_spent import Spent
from autotune.values.trial import Interval


def explained(*parts: Contribution, baseline: float | None = 10.0, total: float | None = 3.0) -> Explanation:
    return Explanation(
        winner=make_config(),
        winner_samples_per_second=30.0,
        baseline_samples_per_second=baseline,
        total=total,
        contributions=parts,
    )


def test_a_waterfall_leads_from_baseline_to_winner():
    steps = waterfall_steps(explained(part("precision", 2.0), part("optim", 1.2)))
    assert [(round(s.start, 6), round(s.end, 6)) for s in steps] == [(10.0, 20.0), (20.0, 24.0), (24.0, 30.0)]
    assert [s.words for s in steps] == ["precision a → b", "optim a → b", "together"]


def test_a_loss_leads_back():
    steps = waterfall_steps(explained(part("precision", 4.0), part("optim", 1.5)))
    assert [s.kind for s in steps] == ["gain", "gain", "rest loss"]
    assert steps[-1].end == pytest.approx(30.0)


def test_what_was_not_measured_in_turn_looks_otherwise():
    steps = waterfall_steps(explained(part("precision", 3.0, "once")))
    assert steps[0].kind == "gain weak"


def test_what_could_not_be_told_looks_so_too_and_has_no_whisker():
    (step,) = waterfall_steps(explained(part("precision", 3.0, interval=Interval(low=0.09, high=469.0))))
    assert (step.kind, step.value, step.low, step.high) == ("gain weak", "couldn't tell", None, None)
    told, *_ = waterfall_steps(explained(part("precision", 3.0)))
    assert (told.kind, told.low, told.high) == ("gain", pytest.approx(27.0), pytest.approx(33.0))


def test_a_knob_without_which_nothing_runs_has_words_for_a_bar():
    needed = waterfall_steps(explained(part("precision", 3.0), part("checkpointing", None, "fails", cause="no memory")))
    assert (needed[1].value, needed[1].start, needed[1].tip) == ("needed", None, "no memory")


def test_without_a_baseline_each_bar_ends_at_the_winner():
    steps = waterfall_steps(explained(part("precision", 2.0), part("optim", 1.5), baseline=None, total=None))
    assert [(s.start, s.end) for s in steps] == [(15.0, 30.0), (20.0, 30.0)]


@pytest.mark.parametrize("width", [346.0, 620.0])
def test_bars_join_where_the_last_one_ended(width):
    chart = waterfall(explained(part("precision", 2.0), part("optim", 1.2)), width)
    bars = [e for e in ET.fromstring(chart.svg()).iter() if (e.get("class") or "").startswith("bar")]
    ends = [(float(b.get("x")), float(b.get("x")) + float(b.get("width"))) for b in bars]
    for (_, end), (start, _) in itertools.pairwise(ends):
        assert start == pytest.approx(end, abs=0.11)  # positions have one decimal
    assert math.isclose(
        (ends[0][1] - ends[0][0]) / (ends[1][1] - ends[1][0]), math.log(2) / math.log(1.2), rel_tol=0.01
    )


def test_nothing_is_drawn_where_nothing_is_told():
    assert waterfall(explained(part("precision", None, "unknown"), total=None), 620.0) is None


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
    chart = ET.fromstring(memory_bars(report, 620.0).svg())
    told = {e.get("data-tip"): e for e in chart.iter() if e.get("data-tip")}
    weights = [float(e.get("width")) for tip, e in told.items() if ": weights " in tip]
    assert len(weights) == 2
    assert weights[0] == weights[1]
    marks = [tip for tip in told if "measured" in tip]
    assert len(marks) == 1


def test_the_longest_takes_all_of_the_width():
    parts = ("first_steps_s", "warm_up_s", "measured_s", "checks_s", "trials_overhead_s", "lost_s", "own_s")
    nothing = Spent(**dict.fromkeys(parts, 0.0), overhead_per_trial_s=None)
    spent = nothing.model_copy(update={"first_steps_s": 10.0, "measured_s": 30.0, "trials_overhead_s": 5.0})
    chart = ET.fromstring(time_bars(spent, 346.0).svg())
    bars = [e for e in chart.iter() if (e.get("class") or "").startswith("bar")]
    assert [float(b.get("width")) for b in bars] == pytest.approx([342, 114, 57])
    assert time_bars(nothing, 346.0) is None
