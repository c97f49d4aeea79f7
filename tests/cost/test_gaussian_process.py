"""The Gaussian process over configurations: what it knows before and after it has seen some."""

import math

import numpy as np
import pytest
from factories import make_config

from autotune.cost.corrections import time_features
from autotune.cost.gaussian_process import Process

PRIORS = {"all": 0.35, "samples": 0.25, "precision": 0.25}


def features(micro_batch: int = 8, **config):
    return time_features(make_config(micro_batch, **config))


def process(seen: list[tuple[dict, float]] = [], *, surprising: tuple[str, ...] = ("precision",)) -> Process:  # noqa: B006
    rows, values = [f for f, _ in seen], [v for _, v in seen]
    return Process(PRIORS, 0.15, frozenset(surprising), rows, values)


def mean(known: Process, row) -> float:
    return float(known.predict([row])[0][0])


def deviation(known: Process, row) -> float:
    return float(known.predict([row])[1][0])


def test_before_anything_is_seen_the_mean_is_nought_and_the_deviation_that_of_the_priors():
    known = process()
    row = {"all": 1.0, "optim=sgd": 1.0, "samples": 0.5}
    assert mean(known, row) == 0.0
    assert deviation(known, row) == pytest.approx(math.sqrt(0.35**2 + 0.15**2 + 0.125**2 + known.residual**2))


def test_what_was_seen_moves_near_ones_more_than_far_ones():
    known = process([(features(8), 0.5)])
    near, farther, far = features(4), features(1), features(1, optim="sgd", checkpointing="full")
    assert 0.5 > mean(known, features(8)) > mean(known, near) > mean(known, farther) > mean(known, far) > 0.2
    assert deviation(known, features(8)) < deviation(known, near) < deviation(known, far)


def test_two_knobs_together_can_be_what_neither_is_alone():
    """Slow only where small micro-batches are checkpointed: no sum over knobs says that."""
    grid = [(size, kind) for size in (1, 2, 8, 16) for kind in ("none", "full")]
    slow = {(1, "full"): 0.6, (2, "full"): 0.6}
    known = process([(features(s, checkpointing=k), slow.get((s, k), 0.0)) for s, k in grid] * 2)
    for size, kind in grid:
        assert mean(known, features(size, checkpointing=kind)) == pytest.approx(slow.get((size, kind), 0.0), abs=0.1)
    assert mean(known, features(4, checkpointing="full")) > mean(known, features(4)) + 0.1


def test_noise_is_learned_from_neighbours_that_disagree():
    generator = np.random.default_rng(0)
    sizes = [1, 2, 4, 8, 16] * 4
    quiet = process([(features(s), 0.01 * float(e)) for s, e in zip(sizes, generator.normal(size=20), strict=True)])
    loud = process([(features(s), 0.2 * float(e)) for s, e in zip(sizes, generator.normal(size=20), strict=True)])
    assert quiet.noise < 0.05 < 0.1 < loud.noise


def test_few_observations_leave_open_how_large_residuals_and_noise_are():
    """Four that agree don't say that the fifth will: it may lie outside of what the likeliest sizes alone expect."""
    few = process([(features(s), 0.0) for s in (1, 2, 4, 8)])
    many = process([(features(s), 0.0) for s in (1, 2, 4, 8)] * 8)
    assert few.noise > 1.5 * many.noise
    assert few.residual > many.residual
    assert deviation(few, features(16, optim="sgd")) > deviation(many, features(16, optim="sgd"))


def test_a_precision_that_is_emulated_is_believed_at_once_and_only_that():
    known = process([(features(8), 0.0), (features(8, precision="bf16"), math.log(10))])
    assert mean(known, features(8, precision="bf16", optim="sgd")) > math.log(5)
    assert abs(mean(known, features(8, optim="sgd"))) < 0.1
    assert deviation(known, features(8, optim="sgd")) < 0.35


def test_a_configuration_does_not_differ_from_itself():
    known = process([(features(8), 0.3), (features(4), 0.2)])
    difference, unsure = known.predict([features(8)], features(8))
    assert difference[0] == pytest.approx(0.0)
    assert unsure[0] == pytest.approx(0.0, abs=1e-5)
