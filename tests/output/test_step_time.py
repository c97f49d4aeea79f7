"""Where a step's time goes, as the answer, `explain` and the report say it."""

import pytest
from answers import BASE, BIG, answer, drawn
from factories import make_budget, make_gpu, make_measurement, make_plan, make_result

from autotune.output.step_time import step_lines, step_rows
from autotune.output.table import explanation_table
from autotune.planning.plan import SearchState
from autotune.values.budget import ProfileTask
from autotune.values.result import Explanation, StepTime
from autotune.values.trial import Interval, Purpose
from autotune.verification.finals import Finals
from autotune.verification.verdict import assemble


def of(
    shares: dict[str, float], *, gpu: bool = True, global_batch: int = 64, baseline: str = BASE.optim, **knobs
) -> list[str]:
    found = answer([(BASE, 10.0), (BIG, 15.0)])
    beaten = found.baseline.model_copy(update={"config": BASE.model_copy(update={"optim": baseline})})
    found = found.model_copy(update={"baseline": beaten})
    step = StepTime(seconds=2.0, shares=shares, is_profiled=True)
    config = found.best.config.model_copy(update=knobs)
    best = found.best.model_copy(update={"step": step, "config": config})
    workload = found.workload.model_copy(update={"global_batch_size": global_batch})
    hardware = make_gpu() if gpu else found.hardware
    return step_lines(found.model_copy(update={"best": best, "hardware": hardware, "workload": workload}))


def test_a_gpu_that_waits_for_the_host_is_told_with_what_would_help():
    told, advice = of({"host": 0.65, "matrix products": 0.3, "optimizer": 0.02, "attention": 0.03})
    assert told == "a step's time goes to: 65% host, 30% matrix products, 3% attention (measured by a profile)"
    assert advice.startswith("the GPU is busy for 35% of a step: the host can't keep up; a larger micro-batch or")
    assert of({"host": 0.65, "element-wise": 0.35}, gpu=False)[1].startswith("65% of a step is host: a larger")
    waiting = {"host": 0.6, "data": 0.3, "matrix products": 0.1}
    assert of(waiting)[1].startswith("the GPU is busy for 10% of a step: ")
    whole = of({"host": 0.65, "element-wise": 0.35}, gpu=False, global_batch=BIG.per_device_train_batch_size)
    assert whole[1] == "65% of a step is host: compiling leaves it less to do"


@pytest.mark.parametrize(
    ("shares", "knobs"),
    [
        ({"matrix products": 0.9, "host": 0.1}, {}),
        ({"host": 0.6, "matrix products": 0.4}, {"torch_compile_backend": "inductor"}),
        ({"optimizer": 0.4, "matrix products": 0.6}, {"optim": "adamw_torch_fused"}),
        ({"optimizer": 0.4, "matrix products": 0.6}, {"optim": "adamw_bnb_8bit"}),
        ({"attention": 0.4, "matrix products": 0.6}, {"attn_implementation": "sdpa"}),
    ],
    ids=["nothing to gain", "compiled", "fused", "8 bits", "sdpa"],
)
def test_a_knob_that_is_turned_already_is_not_advised(shares, knobs):
    assert len(of(shares, **knobs)) == 1


def test_advice_that_the_winner_left_behind_is_not_given_again():
    shares = {"optimizer": 0.4, "matrix products": 0.6}
    assert len(of(shares, optim="adafactor", baseline="adamw_torch")) == 2
    assert len(of(shares, optim="adafactor", baseline="adamw_torch_fused")) == 1


def test_a_profile_tells_what_the_device_did_and_the_rest_of_the_measured_step_is_the_hosts():
    measured = make_measurement(10.0, step_times_s=(2.0, 2.0), data_wait_share=0.25)
    profile = make_measurement(10.0, busy_s={"matrix products": 0.5, "optimizer": 0.5})
    base, best = make_result(BASE, measured, number=0, purpose=Purpose.BASELINE), make_result(BIG, 15.0, number=1)
    check = make_result(BASE, profile, purpose=Purpose.PROFILE, task=ProfileTask(), number=2)
    found = assemble(Finals(SearchState(make_plan(budget=make_budget(), baseline=BASE), [base, best, check])), 60.0)
    base, best = found.baseline.step, found.best.step
    assert base.shares == {"matrix products": 0.25, "optimizer": 0.25, "data": 0.25, "host": 0.25}
    assert (base.seconds, base.is_profiled, best) == (2.0, True, None)
    assert step_rows(found.steps)[-1] == ("a step", "2 s")
    explained = Explanation(
        winner=BIG, winner_samples_per_second=1.0, baseline_samples_per_second=1.0, total=1.0, contributions=(),
        steps=found.steps,
    )  # fmt: skip
    assert "0.5 s, 25%" in drawn(explanation_table(explained))
    unsure = {"winner_samples_per_second": 12.34, "total_interval": Interval(low=2.0, high=9.0)}
    told = " ".join(drawn(explanation_table(explained.model_copy(update=unsure))).split())
    assert "the winner: about 12 samples/s; x baseline: at least 2.00" in told
