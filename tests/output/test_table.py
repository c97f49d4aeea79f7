"""The answer as a table and lines."""

import math
import re

import pytest
from answers import ADAFACTOR, BASE, BF16, BIG, answer, drawn, noisy, report_of
from factories import make_budget, make_config, make_contribution, make_failure, make_measurement, make_workload

from autotune.output.report import html_report
from autotune.output.table import contribution_rows, remarks, result_table, show_config, verdict_line
from autotune.values.budget import Soaked
from autotune.values.config import Parallelism
from autotune.values.result import Explanation, ResultData
from autotune.values.trial import Interval, TrialStatus
from autotune.values.workload import LengthProfile, OwnCode

SEARCHED = [(BASE, 10.0), (BIG, 15.0)]

# Two steps of which one took thirty times as long as the other.
WILD = make_measurement(10.0, step_times_s=(0.1, 3.0), samples_per_second_interval=Interval(low=0.09, high=469_458.0))


def shown(result: ResultData) -> list[str]:
    return [
        " ".join(line.split()) for line in drawn(result_table(result, "best-config.json", "runs/gpt2")).splitlines()
    ]


def row(result: ResultData, label: str) -> list[str]:
    """The cells of the first row of that label."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in drawn(result_table(result)).splitlines())
    return next(cells for cells in lines if cells[0] == label)


def test_lines_to_be_pasted_are_never_wrapped_and_say_how_to_train():
    result, path = answer(SEARCHED), "a/rather/long/path/to/the/place/of/best-config.json"
    lines = drawn(result_table(result, path, "runs/gpt2-20261121-020000"), 40).splitlines()
    assert f"written: {path}" in lines
    assert "all of it: runs/gpt2-20261121-020000 (autotune report runs/gpt2-20261121-020000)" in lines
    assert f"train with it: autotune export {path} --to python --output train.py && python train.py" in lines


@pytest.mark.parametrize(
    ("reorders", "samples"), [(None, "the longest samples"), (True, "the longest samples"), (False, "samples in your")]
)
def test_samples_that_come_in_an_order_of_their_own_are_not_said_to_be_the_longest(reorders, samples):
    code = OwnCode(kind="script", shown="train.py", command=("train.py",), directory="/", reorders=bool(reorders))
    workload = make_workload(own_code=None if reorders is None else code)
    soaked = Soaked(eval_batch_size=None, checkpoint_bytes=1000)
    result = answer(SEARCHED).model_copy(update={"workload": workload, "soaked": soaked})
    (line,) = [line for line in shown(result) if line.startswith("checked on")]
    assert line.startswith(f"checked on {samples}")


def test_a_configuration_of_a_pipeline_is_told_in_a_line():
    config = make_config(8, parallelism=Parallelism(world_size=4, model_parallel=2), own={"schedule": "1f1b"})
    assert show_config(config) == (
        "4 x MP 2, DP 2, micro-batch 8, precision fp32, optim adamw_torch_fused, attention sdpa, schedule 1f1b"
    )


def test_each_number_of_devices_is_told_by_the_fastest_that_was_measured_again():
    two = [make_config(size, parallelism=Parallelism(world_size=2)) for size in (1, 2, 4)]
    finals = [*SEARCHED, (two[0], 18.0), (two[1], 12.0)]
    lines, _ = remarks(answer([*finals, (two[2], 30.0)], finals * 2, budget=make_budget(finalists=3)))
    told = "devices: 1: 15 samples/s, 15 each; 2: 18 samples/s, 9 each; 1 of them has the most samples a device"
    assert told in lines


def test_padding_of_the_baseline_is_told():
    lengths = LengthProfile(samples=1000, mean=250.0, minimum=50, median=250, p95=430, maximum=500)
    padded = answer(SEARCHED).model_copy(update={"workload": make_workload(lengths=lengths, global_batch_size=32)})
    assert "note: about 38% of what the baseline runs is padding" in shown(padded)
    assert "padding" not in "\n".join(shown(answer(SEARCHED)))


def test_the_first_line_is_the_verdict_in_words():
    result = answer(SEARCHED, SEARCHED * 2)
    first, second, *_ = shown(result)
    low, high = result.speedup.interval.low, result.speedup.interval.high
    assert first == f"1.50 x as fast as your baseline ({low:.2f} to {high:.2f} x): micro-batch 16"
    assert second.startswith("tiny (causal-lm), global batch 16")


def test_a_surely_faster_winner_with_a_wide_interval_has_its_lower_end_alone():
    found = answer(SEARCHED, SEARCHED * 2)
    wide = found.speedup.model_copy(update={"interval": Interval(low=1.2, high=3.0)})
    best = found.best.model_copy(update={"speedup": wide})
    result = found.model_copy(update={"speedup": wide, "best": best})
    assert row(result, "winner")[1] == "at least 1.20"
    said = "at least 1.20 x as fast as your baseline, how much more couldn't be told: micro-batch 16"
    assert verdict_line(result) == said


def test_a_kept_baseline_has_the_bound_of_the_best_challenger():
    finals = [(BASE, make_measurement(10.0, spread=0.02)), (BIG, make_measurement(10.1, spread=0.02))] * 2
    result = answer([(BASE, 10.0), (BIG, 10.5)], finals)
    interval = result.runners_up[0].speedup.interval
    assert result.challenger.bound == result.challenger.interval.high == interval.high
    kept = r"the fastest tried isn't faster than your baseline by more than (\d+) %; the baseline is kept"
    percent = int(re.fullmatch(kept, verdict_line(result))[1])
    assert percent - 1 < 100 * (interval.high - 1) <= percent


def test_a_bound_says_of_how_many_it_is():
    """BF16 was never measured again, and may be faster by more."""
    steady = [(c, make_measurement(rate, spread=0.02)) for c, rate in ((BASE, 10.0), (BIG, 10.1), (ADAFACTOR, 10.0))]
    result = answer([(BASE, 10.0), (BIG, 10.7), (ADAFACTOR, 10.6), (BF16, 10.5)], steady * 2)
    said = "none of the 2 fastest of 3 configurations tried is faster than your baseline"
    assert verdict_line(result).startswith(said)
    unknown = result.model_copy(update={"challenger": None})  # nothing stood the finals
    assert verdict_line(unknown) == "nothing tried is clearly faster than your baseline; the baseline is kept"


NEXT = " samples/s in a next run"


def test_tokens_and_how_much_of_the_device_is_used_stand_below_the_table_as_far_as_they_are_known():
    result = answer([(BASE, 10.0), (BIG, 15.0)], [(BASE, 10.0), (BIG, 15.0)])

    def told(tokens: float | None, mfu: float | None, **more: float) -> str:
        base = result.baseline.model_copy(update={"tokens_per_second": tokens and tokens * 10})
        best = result.best.model_copy(update={"tokens_per_second": tokens and tokens * 15, "mfu": mfu, **more})
        (line,) = [line for line in shown(result.model_copy(update={"baseline": base, "best": best})) if NEXT in line]
        found = re.fullmatch(rf"winner ([\d.]+) to ([\d.]+){NEXT}(.*); baseline ([\d.]+) to ([\d.]+){NEXT}(.*)", line)
        assert float(found[1]) < 15.0 < float(found[2])
        assert float(found[4]) < 10.0 < float(found[5])
        return f"{found[3]};{found[6]}"

    assert told(100.0, 0.576) == ", 1,500 tokens/s, 58% MFU;, 1,000 tokens/s"
    assert told(100.0, None) == ", 1,500 tokens/s;, 1,000 tokens/s"
    assert told(None, 0.576) == ", 58% MFU;"
    assert told(None, None) == ";"
    assert told(50.0, 0.288, correction=0.5) == ", about 750 tokens/s, 29% MFU;, 500 tokens/s"


def test_what_was_not_told_is_said_and_not_shown_as_figures():
    result = answer(SEARCHED, [(BASE, noisy(10.0)), (BIG, WILD)])
    assert result.verdict == "undecided"
    assert verdict_line(result).startswith("couldn't tell whether anything tried is faster than your baseline")
    assert row(result, "runner-up")[1] == "couldn't tell"
    assert row(result, "runner-up")[2].startswith("about ")
    for text in ("\n".join(shown(result)), str(result), html_report(report_of(result))):
        visible = re.sub(r"<(style|script|svg).*?</\1>", "", text, flags=re.DOTALL)
        for low, high in re.findall(r"\(([\d.,]+) to ([\d.,?]+)", visible):
            assert float(high.replace(",", "")) <= 2.01 * float(low.replace(",", ""))


def test_ratios_stand_beside_the_baseline_with_their_intervals_where_measured_in_turn():
    searched = [(BASE, 10.0), (BF16, 15.0), (BIG, 12.0)]
    result = answer(searched, [(BASE, 10.0), (BF16, 15.0)] * 2)
    assert row(result, "baseline")[1] == "1"
    assert re.fullmatch(r"1\.50 \(1\.\d\d to 1\.\d\d\)", row(result, "winner")[1])
    assert row(result, "runner-up *")[1] == "about 1.2"
    assert row(answer(searched), "winner *")[1] == "about 1.5"


def test_a_baseline_that_did_not_complete_has_no_figures_and_its_cause_in_the_verdict():
    cause = "no memory left, however long the line that says so becomes"
    result = answer([(BASE, make_failure(TrialStatus.OUT_OF_MEMORY, cause)), (BIG, 15.0)])
    said = f"your baseline did not complete here (out of memory: {cause}); the fastest that does: micro-batch 16"
    assert verdict_line(result) == said
    assert row(result, "baseline")[1:4] == ["–", "–", "–"]
    assert row(result, "winner *")[1] == "15", "no multiple"


def test_inferred_accumulation_is_told_only_of_trials_that_ran_a_part():
    def footnote(steps_of_accumulation: int) -> str:
        part = make_measurement(15.0, accumulation_steps=steps_of_accumulation)
        workload = make_workload(global_batch_size=32)
        whole = make_measurement(10.0, accumulation_steps=4)
        result = answer([(BASE, whole), (make_config(16), part)], workload=workload)
        (line,) = [line for line in remarks(result)[0] if line.startswith("* ")]
        return line

    assert "inferred" not in footnote(2)
    assert footnote(2) == "* measured once, not in turn with the baseline"
    assert "not all micro-batches of a step ran" in footnote(1)


def test_classes_with_the_same_fastest_configuration_stand_together():
    searched = [(BASE, 10.0), (BF16, 15.0), (ADAFACTOR, 14.0)]
    (line,) = [x for x in remarks(answer(searched))[0] if x.startswith("fastest seen")]
    assert line == (
        "fastest seen by what may change (--allow): exact: the baseline; "
        "numerics, optimizer, method: about 1.5 x with micro-batch 16, precision bf16"
    )
    assert not [x for x in remarks(answer(SEARCHED))[0] if x.startswith("fastest seen")]


@pytest.mark.parametrize(
    ("number", "rest"), [(3, None), (4, "1 more note in the report"), (6, "3 more notes in the report")]
)
def test_three_notes_are_shown_and_the_others_counted(number, rest):
    result = answer(SEARCHED, SEARCHED * 2)
    notes = tuple(f"disturbance {n}" for n in range(number))
    result = result.model_copy(update={"proof_notes": (), "disturbances": notes})
    lines = shown(result)
    assert sum(line.startswith("note: ") for line in lines) == 3
    assert [line for line in lines if line.endswith("in the report")] == ([] if rest is None else [rest])
    assert [line for line in remarks(result)[1] if line.startswith("disturbance")] == list(notes)


def test_a_knob_has_its_factor_or_why_there_is_none_and_how_that_is_known():
    def shown(*arguments, **fields) -> tuple[str, str]:
        part, rates = make_contribution("precision", *arguments, **fields), ("winner", "baseline")
        found = {f"{whose}_samples_per_second": 1.0 for whose in rates} | {"winner": BIG, "total": None}
        ((_, factor, known),) = contribution_rows(Explanation(**found, contributions=(part,)))
        return factor, known

    def within(ratio: float, low: float, high: float) -> str:
        return shown(ratio, interval=Interval(low=low, high=high))[0]

    assert [shown(None, basis)[0] for basis in ("fails", "slow", "unknown")] == ["needed", "too slow", "not told"]
    assert shown(None, "fails", cause="no memory", trials=("3",))[1] == "no memory"
    in_turn = "measured in turn with the winner (explain trials 0, 1, 10)"
    assert shown(1.5, trials=("explain 10", "explain 0", "explain 1")) == ("1.50 (1.35 to 1.65)", in_turn)
    assert shown(1.5, "once", trials=("4", "3"))[1] == "told by one trial of the search each (trials 3, 4)"
    assert {within(1.5, *wide) for wide in ((0.0, math.inf), (0.9, 2.0), (-1.0, 1.0))} == {"couldn't tell"}
    assert (within(1.5, 1.2, 3.0), within(0.3, 0.1, 0.9)) == ("at least 1.20", "at most 0.90")
