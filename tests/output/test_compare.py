"""Two answers to the same question, from two environments."""

import json
import math
import re

import pytest
from answers import BASE, BF16, BIG, answer, drawn
from factories import make_hardware, make_spec, make_workload

from autotune.errors import InputError
from autotune.output.compare import Comparison, compare, comparison_table
from autotune.storage.run_directory import read_result
from autotune.values.result import ResultData, StepTime
from autotune.values.statistics import DRIFT
from autotune.values.trial import Interval
from autotune.values.workload import LengthProfile, OwnStep

SEARCHED, FINALS = [(BASE, 10.0), (BIG, 15.0)], [(BASE, 10.0), (BIG, 15.0)]


def slower(by: float, *, parts: bool = True) -> ResultData:
    """An answer of newer versions, in which everything takes longer, and kernels that are not products alone."""
    now = make_hardware(versions={**make_hardware().versions, "torch": "2.99.0"}, driver="600.1")
    found = answer([(c, rate / by) for c, rate in SEARCHED], [(c, rate / by) for c, rate in FINALS])
    return with_step(found.model_copy(update={"hardware": now}), by if parts else None)


def with_step(result: ResultData, by: float | None) -> ResultData:
    if by is None:
        return result
    shares = {"matrix products": 0.8 / by, "element-wise": 1 - 0.8 / by}
    step = StepTime(seconds=by, shares=shares, is_profiled=True)
    return result.model_copy(update={"best": result.best.model_copy(update={"step": step})})


FIRST = with_step(answer(SEARCHED, FINALS), 1.0).model_copy(update={"hardware": make_hardware(driver="600.1")})


def test_the_same_configuration_tells_how_much_slower_and_the_profiles_where():
    found = compare(FIRST, slower(1.25))
    winner, baseline = found.compared
    assert (winner.config, baseline.config) == (BIG, BASE)
    assert winner.ratio == pytest.approx(0.8)
    assert winner.interval.low < 0.8 < winner.interval.high < 1.0
    assert winner.more_s == pytest.approx({"element-wise": 0.25, "matrix products": 0.0})
    assert found.changed["torch"] == (make_hardware().versions["torch"], "2.99.0")
    assert "driver" not in found.changed
    lines = drawn(comparison_table(FIRST, found))
    assert "the second is slower: 0.80 (0." in lines
    assert "a step's parts, second less first: element-wise +0.25 s" in lines


def test_alike_ones_are_not_told_apart_and_parts_are_told_where_they_are_known():
    found = compare(FIRST, slower(1.001, parts=False))
    assert found.compared[0].more_s == {}
    assert "the same speed, as far as can be told" in drawn(comparison_table(FIRST, found))


def test_where_an_interval_is_wide_it_is_said_that_nothing_can_be_told():
    pair, *_ = compare(FIRST, slower(1.25)).compared
    wide = pair.model_copy(update={"interval": Interval(low=0.4, high=1.6)})
    lines = drawn(comparison_table(FIRST, Comparison(compared=(wide,), changed={})))
    rates = "about 12 for about 15 samples/s"
    assert f"couldn't tell which is faster: {rates}, peak memory 1.00 GiB for 1.00 GiB: " in lines


def test_an_answer_that_was_not_measured_again_is_as_sure_as_another_run_of_it_would_be():
    once = FIRST.model_copy(update={"best": FIRST.best.model_copy(update={"confirmed": False})})
    winner, baseline = compare(once, slower(1.25)).compared
    of_a_next_run = math.hypot(math.log(0.8 / baseline.interval.low), 1.96 * DRIFT["cpu"])
    assert winner.interval.low == pytest.approx(0.8 * math.exp(-of_a_next_run))


def test_a_peak_that_is_not_known_is_not_told():
    pair, *_ = compare(FIRST, FIRST).compared
    unknown = Comparison(compared=(pair.model_copy(update={"peak_bytes": (0, 0)}),), changed={})
    assert "peak memory" not in drawn(comparison_table(FIRST, unknown))


def test_rates_are_compared_as_measured_and_disturbances_are_named():
    lucky = FIRST.best.model_copy(update={"correction": 0.5})
    second = FIRST.model_copy(update={"best": lucky, "disturbances": ("noise: others took 60%",)})
    found = compare(FIRST, second)
    assert found.compared[0].ratio == pytest.approx(1.0)
    assert found.changed["disturbances"] == ("none", "noise: others took 60%")


def test_where_a_model_was_named_otherwise_answers_compare_and_equal_disturbances_are_no_difference():
    told = {"disturbances": ("noise: others took 60%",)}
    one, other = (
        FIRST.model_copy(update={**told, "workload": make_workload(model=make_spec(reference=name, path=path))})
        for name, path in (("tiny", None), ("./tiny", "/models/tiny"))
    )
    assert compare(one, other).changed == {}


def test_answers_that_do_not_compare_are_refused():
    other = FIRST.model_copy(update={"workload": make_workload(global_batch_size=64)})
    with pytest.raises(InputError, match="train something else: global batch size 16 and 64"):
        compare(FIRST, other)
    step = OwnStep(name="step", takes_accumulation=False, knobs={}, directory="/", search_path=())
    for fields, said in (
        ({"own_step": step}, "loop none and its own"),
        ({"fixed_arguments": {"label_smoothing_factor": 0.1}}, "label_smoothing_factor none and 0.1"),
        ({"images": 4}, "images none and 4"),
    ):
        with pytest.raises(InputError, match=said):
            compare(FIRST, FIRST.model_copy(update={"workload": make_workload(**fields)}))
    learning = {"fixed_arguments": {"learning_rate": 1.0, "save_steps": 9}}
    assert compare(FIRST, FIRST.model_copy(update={"workload": make_workload(**learning)})).changed == {}
    lengths = LengthProfile(samples=9, mean=40.0, minimum=1, median=40, p95=80, maximum=90)
    with pytest.raises(InputError, match=r"train something else: mean length of the data none and 40\.0"):
        compare(FIRST, FIRST.model_copy(update={"workload": make_workload(lengths=lengths)}))
    apart = answer([(BF16, 10.0)], baseline=BF16)
    with pytest.raises(InputError, match="no configuration in common"):
        compare(FIRST, apart)


def test_the_command_reads_two_answers(command, tmp_path):
    for name, result in (("a", FIRST), ("b", slower(1.25))):
        result.save(tmp_path / f"{name}.json")
    done = command("compare", tmp_path / "a.json", tmp_path / "b.json", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["compared"][0]["ratio"] == pytest.approx(0.8)
    endless = {"samples_per_second_interval": Interval(low=0.0, high=math.inf)}
    best = FIRST.best.model_copy(update={"measurement": FIRST.best.measurement.model_copy(update=endless)})
    (once := FIRST.model_copy(update={"best": best})).save(tmp_path / "once.json")
    unknown = command("compare", tmp_path / "once.json", tmp_path / "once.json", "--json")
    for text in (unknown.stdout, (tmp_path / "once.json").read_text()):
        json.loads(text, parse_constant=pytest.fail)
    assert read_result(tmp_path / "once.json") == once
    good, refused = (tmp_path / "a.json").read_text(), [command("compare", tmp_path / "a.json", tmp_path / "none.json")]
    odd = {"samples_per_second": "NaN", "search_time_s": "Infinity", "correction": 0, "own_s": -1, "resident_bytes": -1}
    for name, value in odd.items():
        (changed := tmp_path / "changed.json").write_text(re.sub(f'("{name}": )(\\d[\\d.e-]*)', rf"\g<1>{value}", good))
        assert changed.read_text() != good, name
        refused.append(command("compare", tmp_path / "a.json", changed))
        assert f"{name}: expected" in refused[-1].stderr
    assert [done.exit_code for done in refused] == [2] * len(refused)
