"""Reports of estimates: whether something fits, intervals, and JSON."""

import pytest
from pydantic import TypeAdapter

from autotune.estimates.report import ConfigReport, DevicesReport, RankingReport, Report, chance_to_fit, fit
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
