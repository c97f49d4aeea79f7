"""Reports of estimates: whether something fits, intervals, the cost of a run, and JSON."""

import pytest
from factories import make_config, make_gpu, make_workload
from pydantic import TypeAdapter

from autotune.errors import InputError
from autotune.estimates.report import (
    ConfigReport,
    Device,
    DevicesReport,
    RankingReport,
    Report,
    chance_to_fit,
    fit,
    predicted,
    run_cost,
)
from autotune.values.estimate import CostEstimate, MemoryBreakdown
from autotune.values.model import Task
from autotune.values.trial import Interval


@pytest.mark.parametrize(
    ("high", "middle", "low", "expected"),
    [(9, 8, 7, "yes"), (11, 9, 8, "probably"), (12, 11, 9, "probably not"), (13, 12, 11, "no")],
)
def test_whether_it_fits_goes_by_the_interval(estimated, high, middle, low, expected):
    memory = estimated(fix={"micro-batch": "8"}).predicted.memory
    changed = {"device_peak_bytes": middle, "device_interval": Interval(low=low, high=high)}
    assert fit(memory.model_copy(update=changed), 10) == expected


def test_the_chance_to_fit_counts_a_part_of_what_the_allocator_holds_unused(estimated):
    memory = estimated(fix={"micro-batch": "8"}).predicted.memory
    sizes = {"allocated_peak_bytes": 800, "reserved_peak_bytes": 1000, "framework_bytes": 100}
    changed = memory.model_copy(update={**sizes, "device_interval": Interval(low=1100 - 98, high=1100 + 98)})
    chances = [chance_to_fit(changed, capacity) for capacity in (850, 900, 950, 1000, 1100)]
    assert chances[2] == pytest.approx(0.5)  # 800 + 100 + 200 / 4
    assert chances[3] == pytest.approx(0.841, abs=0.001)  # a standard deviation of 50 more
    assert chances == sorted(chances)
    assert [fit(changed, capacity) for capacity in (940, 960)] == ["no", "probably"]


def test_intervals_hold_what_is_predicted(estimated):
    speed = estimated(fix={"micro-batch": "8"}).predicted.speed
    for value, interval in (
        (speed.step_time_s, speed.step_time_interval),
        (speed.samples_per_second, speed.samples_per_second_interval),
        (speed.tokens_per_second, speed.tokens_per_second_interval),
        (speed.mfu, speed.mfu_interval),
    ):
        assert interval.low < value < interval.high
    assert speed.mfu_interval.high <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"fix": {"micro-batch": "8"}}, {}, {"gpu": "all", "fix": {"precision": "bf16"}}],
    ids=["one", "best", "all"],
)
def test_a_report_survives_json(estimated, options):
    found = estimated(tokens=1e9, **options)
    again = TypeAdapter(Report).validate_json(found.model_dump_json())
    assert again == found
    assert again.schema_version == 1
    assert (
        type(again) is {"configuration": ConfigReport, "ranking": RankingReport, "devices": DevicesReport}[found.kind]
    )


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
    assert cost(of=found(rates=None)).hours is None  # no speed is known


@pytest.mark.parametrize(
    ("task", "what"),
    [(Task.SPEECH_CTC, "sound, which has none"), (Task.IMAGE_CLASSIFICATION, "images, which have none")],
)
def test_neither_sound_nor_images_have_tokens(task, what):
    with pytest.raises(InputError, match=f"--tokens: tiny is trained on {what}"):
        cost(workload=make_workload(task=task))
