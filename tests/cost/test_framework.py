"""What a process takes beside its training, and how sure the rates of a device are."""

from factories import make_gpu, make_hardware
from profiles import make_rates

from autotune.cost.framework import framework_bytes, time_deviation

MIB = 1 << 20


def test_a_gpus_context_is_some_hundred_mib():
    """A context alone takes 0.47 GiB; with a Trainer's run up to 2 GiB were seen."""
    mean, deviation = framework_bytes(make_gpu())
    assert 470 * MIB < mean < 2000 * MIB
    assert 0 < deviation < mean


def test_a_cpus_process_takes_little_beside_its_training():
    mean, _ = framework_bytes(make_hardware())
    assert 7 * MIB < mean < 20 * MIB


def test_measured_rates_are_the_surest_and_a_processors_table_the_least_sure():
    measured, table = make_rates(), make_rates(source="table")
    assert time_deviation(measured, make_gpu()) < time_deviation(table, make_gpu())
    assert time_deviation(table, make_gpu()) < time_deviation(table, make_hardware())
