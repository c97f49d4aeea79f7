"""Micro-batches of samples of several lengths: padding, and the cuts of the Trainer's sampler."""

import numpy as np
import pytest
from factories import make_config, make_workload
from transformers.trainer_pt_utils import BatchRebalanceSampler

from autotune.cost.lengths import QUADRATIC_COST, balanced_cut, expected_longest, in_full_length, padding_share
from autotune.values.workload import LengthProfile

LENGTHS = LengthProfile(samples=1000, mean=20.0, minimum=5, median=18, p95=40, maximum=60)
RANDOM = np.random.default_rng(0)
STEPS = {  # the lengths of one step's samples
    "even": RANDOM.integers(8, 512, 64), "log-normal": np.minimum(2048, RANDOM.lognormal(5.5, 0.8, 64).astype(int) + 1),
    "one long among short ones": np.array([2000] + [50] * 31), "two kinds": np.array([2048] * 16 + [128] * 112),
    "equal": np.full(32, 300), "few": np.array([900, 400, 250, 100, 90, 80, 30, 20]),
}  # fmt: skip


def workload(**fields):
    return make_workload(lengths=LENGTHS, global_batch_size=64, **fields)


def balanced(*sizes: float, **fields):
    return in_full_length(workload(**fields), make_config(train_sampling_strategy="batch_rebalance"), np.array(sizes))


@pytest.mark.parametrize("samples", [1, 2, 3, 8, 100, 10_000])
def test_the_longest_of_a_micro_batch_is_between_mean_and_maximum(samples):
    (longest,) = expected_longest(LENGTHS, np.array([float(samples)]))
    assert LENGTHS.mean <= longest <= LENGTHS.maximum


def test_samples_of_one_length_are_as_they_are():
    found = in_full_length(make_workload(), make_config(), np.array([1.0, 8.0]))
    assert found.mean.tolist() == found.largest.tolist() == [1, 8]


@pytest.mark.parametrize("size", [1, 8])
def test_samples_padded_to_a_multiple_are_as_long_as_drawn_ones_on_average(size):
    lengths = np.random.default_rng(0).integers(100, 513, (20_000, size)).max(axis=1)
    known = LengthProfile(samples=1000, mean=306, minimum=100, median=306, p95=492, maximum=512)
    workload = make_workload(lengths=known, global_batch_size=64)
    found = in_full_length(workload, make_config(pad_to_multiple_of=48), np.array([1.0 * size]))
    rows = -(-lengths // 48) * 48
    assert found.mean * known.maximum == pytest.approx(rows.mean() * size, rel=0.02)
    assert found.attended * known.maximum**2 == pytest.approx((rows.astype(float) ** 2).mean() * size, rel=0.1)
    assert found.largest * known.maximum == pytest.approx(528 * size)


@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("name", STEPS)
def test_the_cut_of_a_step_is_that_of_the_sampler(name, groups):
    assert QUADRATIC_COST == BatchRebalanceSampler.QUADRATIC_COST_COEF
    lengths = STEPS[name]
    theirs = list(BatchRebalanceSampler(lengths.tolist(), len(lengths), dp_size=1, grad_accum=groups, shuffle=False))
    positions = [len(batch) * lengths[batch].max() for batch in theirs]
    ours = balanced_cut(np.sort(lengths)[::-1].astype(float), groups)
    assert ours.padded == pytest.approx(sum(positions) / lengths.sum())
    assert ours.largest == max(positions)


def test_balanced_micro_batches_are_padded_less_than_random_ones_and_more_than_not_at_all():
    sizes = np.array([2.0, 4, 8, 16])
    random = in_full_length(workload(), make_config(), sizes).mean
    found = balanced(*sizes).mean
    assert (found < random).all()
    assert (found > sizes * LENGTHS.mean / LENGTHS.maximum).all()


def test_single_samples_have_no_padding_and_not_a_little_less():
    for mean in (20 + n / 7 for n in range(50)):
        lengths = LENGTHS.model_copy(update={"mean": mean, "maximum": 49})
        assert f"{padding_share(make_workload(lengths=lengths), make_config(1)):.0%}" == "0%"


@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_share_of_padding_is_that_of_drawn_micro_batches(size):
    lengths = np.random.default_rng(0).integers(100, 513, (20_000, size))
    known = LengthProfile(samples=1000, mean=306, minimum=100, median=306, p95=492, maximum=512)
    padded = make_workload(lengths=known, global_batch_size=64)
    drawn = 1 - lengths.sum() / (size * lengths.max(axis=1).sum())
    assert padding_share(padded, make_config(size)) == pytest.approx(drawn, abs=0.01)
    assert padding_share(padded, make_config(size, packing=True)) == 0
    assert padding_share(padded, make_config(size, pad_to_multiple_of=64)) > drawn + 0.02
    assert padding_share(make_workload(), make_config(size)) == 0


def test_the_largest_has_no_more_than_the_longest_samples_and_no_less_than_a_usual_one():
    found = balanced(4.0, 8.0, 16.0)
    assert (found.largest <= [4, 8, 16]).all()
    assert (found.largest > found.mean).all()


def test_many_short_samples_can_be_more_than_a_few_long_ones():
    kinds = LengthProfile(samples=10**6, mean=1000.0, minimum=32, median=1000, p95=2000, maximum=2048)
    step = make_workload(lengths=kinds, global_batch_size=1024)
    config = make_config(train_sampling_strategy="batch_rebalance")
    assert in_full_length(step, config, np.array([8.0])).largest[0] >= 7.9
