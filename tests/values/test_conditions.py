"""Disturbances of a trial: warnings, the worst of several ranks, and the processes that keep a machine busy."""

import pytest

from autotune.values.conditions import Conditions, throttle_reasons


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        ({"others_share": 0.01, "stolen_share": 0.0, "temperature_c": 60}, ()),
        ({"others_share": 0.31}, ("other processes took 31% of the cores' time while it was measured",)),
        ({"stolen_share": 0.07}, ("the hypervisor took 7% of the cores' time while it was measured",)),
        ({"throttled": {"heat": 0.5, "power cap": 1.0, "power brake": 0.1}, "temperature_c": 91},
         ("the GPU was slowed down by heat (50% of the time), power brake (10% of the time), at 91 °C",)),
        ({"throttled": {"power cap": 1.0}, "temperature_c": 70}, ()),  # where it settles under load
    ],
)  # fmt: skip
def test_disturbances_are_worth_a_line_each(found, lines):
    assert Conditions(**found).warnings() == lines


@pytest.mark.parametrize(("idle", "taken"), [(0.0, 0.0), (0.02, 0.02), (0.5, 0.31), (None, 0.31)])
def test_others_on_the_cores_cost_a_gpu_no_more_than_it_stood_idle(idle, taken):
    found = Conditions(others_share=0.31, stolen_share=0.01, idle_share=idle)
    assert found.taken_share == taken
    assert bool(found.warnings()) is (taken >= 0.05)


def test_of_several_ranks_the_worst_of_each_kind_counts():
    ranks = [Conditions(idle_share=0.1, throttled={"heat": 0.5}), Conditions(idle_share=0.4)]
    worst = Conditions.worst_of([*ranks, Conditions(throttled={"heat": 0.2, "power cap": 0.1})])
    assert worst == Conditions(idle_share=0.4, throttled={"heat": 0.5, "power cap": 0.1})
    assert Conditions.worst_of([]) is None


def test_idleness_and_settings_are_no_reasons_for_throttling():
    assert throttle_reasons(0x1 | 0x2 | 0x10 | 0x100) == ()  # idle; application clocks, sync boost, display clocks
    assert throttle_reasons(0x4) == ("power cap",)
    assert throttle_reasons(0x20 | 0x40 | 0x8) == ("hardware slowdown", "heat", "heat (hardware)")
