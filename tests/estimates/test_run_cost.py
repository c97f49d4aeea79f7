"""Tokens, FLOP and hours."""

import pytest
from factories import make_config, make_gpu, make_workload

from autotune.errors import InputError
from autotune.estimates.report import Device, predicted
from autotune.estimates.run_cost import run_cost, tokens_per_sample
from autotune.values.estimate import CostEstimate, MemoryBreakdown
from autotune.values.model import Task
from autotune.values.trial import Interval

T5_3B_PARAMETERS = 2_851_598_336


def found(*, rates: str | None = "table"):
    """A configuration of 16 samples of 128 tokens a step, that takes 1e12 FLOP and half a second for one."""
    fields = [name for name in MemoryBreakdown.model_fields if name.endswith("_bytes")]
    intervals = [name for name in MemoryBreakdown.model_fields if name.endswith("_interval")]
    estimate = CostEstimate(
        memory=MemoryBreakdown(**dict.fromkeys(fields, 1), **dict.fromkeys(intervals, Interval(low=0, high=2))),
        step_time_s=0.5,
        step_time_interval=Interval(low=0.25, high=1.0),
        samples_per_second=32.0,
        samples_per_second_interval=Interval(low=16.0, high=64.0),
        tokens_per_second=4096.0,
        flops_per_step=1e12,
        mfu=0.4,
        traced_by="meta",
    )
    hardware = make_gpu()
    device = Device(name="a100-80gb", hardware=hardware, memory_bytes=hardware.memory_bytes, rates=rates)
    return predicted(make_config(16), estimate, workload=make_workload(), device=device)


def cost(**fields):
    defaults = {"tokens": 1e9, "workload": make_workload(), "parameters": 1000}
    return run_cost(fields.pop("of", found()), **{**defaults, **fields})


def test_six_flop_for_each_parameter_and_token():
    run = cost(parameters=T5_3B_PARAMETERS, tokens=300e9)
    assert run.flops_by_parameters == pytest.approx(6 * T5_3B_PARAMETERS * 300e9)
    assert run.flops_by_parameters == pytest.approx(5.133e21, rel=1e-3)
    assert run.petaflop_s_days_by_parameters == pytest.approx(59.41, rel=1e-3)


def test_what_the_model_needs_is_that_of_its_steps():
    run = cost(tokens=16 * 128 * 1000)  # a thousand steps
    assert run.needed_flops == pytest.approx(1e15)
    assert run.needed_petaflop_s_days == pytest.approx(1 / 86400)


def test_hours_follow_from_the_predicted_speed():
    run = cost(tokens=4096.0 * 3600 * 10)
    assert (run.hours, run.gpu_hours) == pytest.approx((10, 10))
    assert (run.hours_interval.low, run.hours_interval.high) == pytest.approx((5, 20))


def test_without_a_speed_there_are_no_hours():
    assert cost(of=found(rates=None)).hours is None


def test_sound_has_no_tokens():
    with pytest.raises(InputError, match="--tokens: tiny is trained on sound, which has none"):
        tokens_per_sample(make_workload(task=Task.SPEECH_CTC))


def test_images_have_no_tokens():
    with pytest.raises(InputError, match="--tokens: tiny is trained on images"):
        cost(workload=make_workload(task=Task.IMAGE_CLASSIFICATION))
