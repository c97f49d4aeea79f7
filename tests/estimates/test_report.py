"""Reports of estimates: whether something fits, intervals, the cost of a run, and JSON."""

import pytest
from factories import make_config, make_gpu, make_workload
from pydantic import TypeAdapter

from autotune.errors import InputError
from autotune.estimates.report import Device, Predicted, Report, RunCost, chance_to_fit, fit
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


def test_the_chance_to_fit_counts_a_part_of_the_allocators_unused_memory(estimated):
    memory = estimated(fix={"micro-batch": "8"}).predicted.memory
    sizes = {"allocated_peak_bytes": 800, "reserved_peak_bytes": 1000, "framework_bytes": 100}
    changed = memory.model_copy(update={**sizes, "device_interval": Interval(low=1100 - 98, high=1100 + 98)})
    chances = [chance_to_fit(changed, capacity) for capacity in (850, 900, 950, 1000, 1100)]
    assert chances[2] == pytest.approx(0.5)  # 800 + 100 + 200 / 4
    assert chances[3] == pytest.approx(0.841, abs=0.001)  # a standard deviation of 50 more
    assert chances == sorted(chances)
    assert [fit(changed, capacity) for capacity in (940, 960)] == ["no", "probably"]


def test_intervals_hold_the_prediction(estimated):
    speed = dict(estimated(fix={"micro-batch": "8"}).predicted.speed)
    for name, interval in (("step_time_s", "step_time_interval"), *((n, f"{n}_interval") for n in RATES)):
        assert speed[interval].low < speed[name] < speed[interval].high
    assert speed["mfu_interval"].high <= 1


def test_no_speed_is_beyond_the_peak_of_the_device(estimated):
    fix = {"micro-batch": "1", "precision": "bf16", "checkpointing": "full", "sharding": "fsdp_full"}
    found = estimated(model="llama-2-7b", gpu="h100-80gb", devices=8, seq_len=4096, global_batch=64, fix=fix)
    speed = found.predicted.speed
    assert speed.mfu_interval.high == pytest.approx(1.0)
    assert speed.step_time_interval.low == pytest.approx(speed.step_time_s * speed.mfu)
    assert speed.tokens_per_second_interval.high == pytest.approx(speed.tokens_per_second / speed.mfu)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"fix": {"micro-batch": "8"}}, {}, {"gpu": "all", "fix": {"precision": "bf16"}}],
    ids=["one", "best", "all"],
)
def test_a_report_survives_json(estimated, options):
    found = estimated(tokens=1e9, **options)
    again = TypeAdapter(Report).validate_json(found.model_dump_json())
    assert (again, again.schema_version) == (found, 1)
    assert type(again) is type(found)


RATES = ("samples_per_second", "tokens_per_second", "mfu")


def found(rates: str | None = "a data sheet"):
    """A configuration of 16 samples of 128 tokens a step, that takes 1e12 FLOP and half a second for one."""
    fields = [name for name in MemoryBreakdown.model_fields if name.endswith("_bytes")]
    intervals = [name for name in MemoryBreakdown.model_fields if name.endswith("_interval")]
    estimate = CostEstimate(
        memory=MemoryBreakdown(**dict.fromkeys(fields, 1), **dict.fromkeys(intervals, Interval(low=0, high=2))),
        step_time_s=0.5, step_time_interval=Interval(low=0.25, high=1.0), samples_per_second=32.0,
        samples_per_second_interval=Interval(low=16.0, high=64.0), tokens_per_second=4096.0,
        tokens_per_second_interval=Interval(low=2048.0, high=8192.0), flops_per_step=1e12, mfu=0.4,
    )  # fmt: skip
    hardware = make_gpu()
    device = Device(name="a100-80gb", hardware=hardware, memory_bytes=hardware.memory_bytes, rates=rates)
    return Predicted.of(make_config(16), estimate, workload=make_workload(), device=device)


def cost(of=None, **fields):
    return RunCost.of(of or found(), **{"tokens": 1e9, "parameters": 1000, "workload": make_workload(), **fields})


def test_a_run_takes_six_flop_for_each_parameter_and_token_or_those_of_its_steps():
    run = cost(parameters=2_851_598_336, tokens=300e9)  # T5-3B
    assert run.flops_by_parameters == pytest.approx(5.133e21, rel=1e-3)
    assert run.petaflop_s_days_by_parameters == pytest.approx(59.41, rel=1e-3)
    run = cost(tokens=16 * 128 * 1000)  # a thousand steps
    assert (run.needed_flops, run.needed_petaflop_s_days) == pytest.approx((1e15, 1 / 86400))


def test_hours_follow_from_the_predicted_speed():
    run = cost(tokens=4096.0 * 3600 * 10)
    assert (run.hours, run.gpu_hours) == pytest.approx((10, 10))
    assert (run.hours_interval.low, run.hours_interval.high) == pytest.approx((5, 20))
    assert cost(found(rates=None)).hours is None  # no speed is known


def test_neither_sound_nor_images_have_tokens():
    for task, samples in ((Task.SPEECH_CTC, "sound, which has"), (Task.IMAGE_CLASSIFICATION, "images, which have")):
        with pytest.raises(InputError, match=f"--tokens: tiny is trained on {samples} none"):
            cost(workload=make_workload(task=task))
