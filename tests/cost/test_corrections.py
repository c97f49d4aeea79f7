"""What was measured corrects what is predicted: for all, for those that share a knob, and for the next search."""

import math

import numpy as np
import pytest
from factories import make_config, make_gpu, make_hardware
from profiles import make_rates

from autotune.cost.corrections import (
    EXPECTED,
    Corrections,
    Observation,
    Process,
    TimeSpread,
    memory_features,
    regression,
    time_features,
)
from autotune.cost.memory import Components
from autotune.units import GIB
from autotune.values.estimate import Timings
from autotune.values.techniques import LoraAdapter

MIB = 1 << 20
FRAMEWORK = (500.0 * MIB, 200.0 * MIB)


def parts(activations: float = 4.0, *, fixed: float = 6.0, temporaries: float = 0.5) -> Components:
    """Components in GiB."""
    return Components(fixed * GIB, 0.0, 0.0, activations * GIB, temporaries * GIB, 0.0, "mm")


def observation(predicted: Components = parts(), ratio: float = 1.0, **fields) -> Observation:  # noqa: B008
    defaults = {
        "key": "a", "memory_features": memory_features(predicted, 0.0), "memory": {"device": ratio},
        "time_features": time_features(make_config()), "log_time": 0.0,
    }  # fmt: skip
    return Observation(**{**defaults, **fields})


def corrections(*observations: Observation) -> Corrections:
    return Corrections(observations, FRAMEWORK, TimeSpread(0.35))


def seconds(learned: Corrections, **config) -> float:
    """The factor on the predicted seconds of a configuration."""
    mean, _ = learned.log_time([time_features(make_config(**config))])
    return math.exp(mean[0])


def test_before_any_measurement_the_device_needs_the_counted_bytes_and_those_of_the_framework():
    predicted = parts()
    factor, deviation = corrections().memory("device", memory_features(predicted, 0.0))
    assert factor * predicted.allocated == pytest.approx(predicted.allocated + 500 * MIB)
    assert 0.01 < deviation < 0.1


def test_memory_is_never_predicted_to_be_less_than_none_after_trials_smaller_than_the_noise_of_a_process():
    tiny = parts(0.01, fixed=0.01, temporaries=0.0)
    learned = corrections(*(observation(tiny, -40.0, key=key) for key in "abc"))
    factor, deviation = learned.memory("device", memory_features(parts(0.005, fixed=0.005, temporaries=0.0), 0.0))
    assert (factor, deviation > 0) == (0.25, True)


def test_three_measurements_bring_the_error_of_a_fourth_under_1_percent():
    """The device really takes more of activations, and a constant."""
    sizes = [parts(activations) for activations in (1.0, 4.0, 8.0, 16.0)]
    *three, fourth = [observation(p, (p.allocated + 0.07 * p.activations + 900 * MIB) / p.allocated) for p in sizes]
    before, _ = corrections().memory("device", fourth.memory_features)
    after, deviation = corrections(*three).memory("device", fourth.memory_features)
    assert abs(before / fourth.memory["device"] - 1) > 0.04
    assert abs(after / fourth.memory["device"] - 1) < 0.01
    assert abs(after - fourth.memory["device"]) < 1.96 * deviation


def test_a_small_run_says_less_than_a_large_one():
    """What a process takes beside its training differs from run to run."""
    features = memory_features(parts(), 0.0)
    small, large = (parts(4.0 * s, fixed=6.0 * s, temporaries=0.5 * s) for s in (0.001, 1.0))
    untouched, _ = corrections().memory("device", features)
    moved = []
    for size in (small, large):
        counted, _ = corrections().memory("device", memory_features(size, 0.0))
        learned = corrections(observation(size, counted + 0.05))
        moved.append(abs(learned.memory("device", features)[0] - untouched))
    assert moved[0] < moved[1]


def test_before_anything_is_measured_time_is_as_predicted_and_unsure():
    mean, deviation = corrections().log_time([time_features(make_config())])
    assert mean == [0.0]
    assert deviation[0] > 0.35
    assert seconds(corrections(observation(log_time=None, ratio=1.2))) == 1.0  # a run without a time says nothing


def test_the_first_measurement_moves_everything():
    learned = corrections(observation(log_time=math.log(2)))
    assert seconds(learned) == pytest.approx(2.0, rel=0.02)
    assert seconds(learned, precision="bf16", checkpointing="full") > 1.35


def test_a_trial_that_is_observed_again_counts_once_and_for_the_quantity_that_was_measured_alone():
    again = corrections(observation(ratio=1.3)).with_observations(observation(ratio=1.1))
    assert [o.memory["device"] for o in again.observations] == [1.1]
    features = memory_features(parts(), 0.0)
    assert again.memory("device", features) == corrections(observation(ratio=1.1)).memory("device", features)
    assert again.memory("allocated", features)[0] == pytest.approx(1.0)


def test_coefficients_go_from_their_priors_to_the_truth():
    priors = {"a": (1.0, 0.5), "b": (2.0, 0.1)}
    mean, covariance = regression(priors, [], [], [])
    assert mean == pytest.approx([1.0, 2.0])
    assert np.diag(covariance) == pytest.approx([0.5**2, 0.1**2])
    random = np.random.default_rng(0)
    rows = [{"a": a, "b": b} for a, b in random.uniform(0, 1, (200, 2))]
    values = [-3.0 * row["a"] + 2.5 * row["b"] + random.normal(0, 0.1) for row in rows]
    mean, covariance = regression(priors, rows, values, [0.1] * 200)
    assert mean == pytest.approx([-3.0, 2.5], abs=0.1)
    assert covariance[0, 0] < 0.06**2
    mean, covariance = regression(priors, [{"a": 1.0}], [9.0], [0.1])
    assert (mean[1], covariance[1, 1]) == pytest.approx((2.0, 0.1**2))  # was never observed


def test_measured_operators_are_the_surest_and_a_processors_rates_the_least_sure():
    rates = make_rates()
    assert TimeSpread.of(rates, make_gpu()) < TimeSpread.of(rates, make_hardware())
    timed = rates.model_copy(update={"timings": Timings(operator_s=0.0, micro_step_s=0.0)})
    assert TimeSpread.of(timed, make_hardware()) < TimeSpread.of(rates, make_hardware())
    # A GPU with published trainings is surer than its generation, and that than a data sheet.
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA A10", "NVIDIA H100 80GB HBM3")
    spreads = [TimeSpread.of(rates, make_gpu(name=name)) for name in names]
    assert sorted(spreads) == spreads
    assert len(set(spreads)) == 3


def test_each_training_on_several_devices_is_unsure_by_itself():
    alone = {"all": 1.0, "samples": 0.5}
    several = {**alone, "several": 1.0}
    trial = Observation(key="a", memory_features={}, memory={}, time_features=several, log_time=0.2)
    known = Corrections([trial], FRAMEWORK, TimeSpread(0.03, 0.25, 0.18, 0.27))
    deviations = [known.log_time([features])[1][0] for features in (alone, several)]
    assert deviations[0] < 0.27 < deviations[1]


def features(micro_batch: int = 8, **config):
    return time_features(make_config(micro_batch, **config))


def process(*seen: tuple[dict, float]) -> Process:
    priors = {"all": 0.35, "samples": 0.25, "precision": 0.25}
    return Process(priors, 0.15, [f for f, _ in seen], [v for _, v in seen])


def mean(known: Process, row) -> float:
    return float(known.predict([row])[0][0])


def deviation(known: Process, row) -> float:
    return float(known.predict([row])[1][0])


def test_before_anything_is_seen_the_mean_is_nought_and_the_deviation_that_of_the_priors():
    known = process()
    row = {"all": 1.0, "optim=sgd": 1.0, "samples": 0.5}
    assert mean(known, row) == 0.0
    assert deviation(known, row) == pytest.approx(math.sqrt(0.35**2 + 0.15**2 + 0.125**2 + EXPECTED.residual**2))


def test_observations_move_near_configurations_more_than_far_ones():
    known = process((features(8), 0.5))
    near, farther, far = features(4), features(1), features(1, optim="sgd", checkpointing="full")
    assert 0.5 > mean(known, features(8)) > mean(known, near) > mean(known, farther) > mean(known, far) > 0.2
    assert deviation(known, features(8)) < deviation(known, near) < deviation(known, far)


def test_two_knobs_together_can_be_slow_that_are_fast_alone():
    """Slow only where small micro-batches are checkpointed: no sum over knobs says that."""
    grid = [(size, kind) for size in (1, 2, 8, 16) for kind in ("none", "full")]
    slow = {(1, "full"): 0.6, (2, "full"): 0.6}
    known = process(*[(features(s, checkpointing=k), slow.get((s, k), 0.0)) for s, k in grid] * 2)
    for size, kind in grid:
        assert mean(known, features(size, checkpointing=kind)) == pytest.approx(slow.get((size, kind), 0.0), abs=0.1)
    assert mean(known, features(4, checkpointing="full")) > mean(known, features(4)) + 0.1


def test_noise_is_learned_from_neighbours_that_disagree():
    generator = np.random.default_rng(0)
    quiet, loud = (
        process(*((features(s), noise * float(generator.normal())) for s in [1, 2, 4, 8, 16] * 4))
        for noise in (0.01, 0.3)
    )
    assert quiet.noise < 0.05 < 0.1 < loud.noise


def test_few_observations_leave_open_how_large_noise_is():
    """Four that agree don't say that the fifth will: it may lie outside of what the likeliest sizes alone expect."""
    four = [(features(s), 0.0) for s in (1, 2, 4, 8)]
    few, many = process(*four), process(*four * 8)
    assert few.noise > 1.5 * many.noise
    assert deviation(few, features(16, optim="sgd")) > deviation(many, features(16, optim="sgd"))


def test_a_precision_that_is_emulated_is_believed_at_once_and_only_that():
    known = process((features(8), 0.0), (features(8, precision="bf16"), math.log(10)))
    assert mean(known, features(8, precision="bf16", optim="sgd")) > math.log(5)
    assert abs(mean(known, features(8, optim="sgd"))) < 0.1
    assert deviation(known, features(8, optim="sgd")) < 0.35


def test_a_configuration_does_not_differ_from_itself():
    known = process((features(8), 0.3), (features(4), 0.2))
    difference, unsure = known.predict([features(8)], features(8))
    assert difference[0] == pytest.approx(0.0)
    assert unsure[0] == pytest.approx(0.0, abs=1e-5)


def test_the_errors_of_configurations_that_share_knobs_go_together():
    known = process((features(8), 0.3), (features(4, optim="sgd"), 0.2))
    rows, beside = [features(2), features(2, precision="bf16"), features(1, precision="bf16")], features(8)
    together, alone = known.predict(rows, beside, together=True)[1], known.predict(rows, beside)[1]
    assert np.diag(together) == pytest.approx(alone**2)
    assert np.linalg.eigvalsh(together).min() > 0
    correlation = together / np.outer(alone, alone)
    assert 1 > correlation[1, 2] > correlation[0, 2] > 0


@pytest.mark.parametrize(
    ("knobs", "other"), [({"adapter": LoraAdapter()}, {"optim": "adafactor"}), ({"precision": "bf16"}, {"tf32": True})]
)
def test_a_knob_that_can_change_little_is_not_expected_to(knobs, other):
    known = process((features(8, **knobs), 0.1), (features(8), 0.0))
    little = known.predict([features(8, **knobs, **other)], features(8, **knobs))[1]
    much = known.predict([features(8, **other)], features(8))[1]
    assert 0 < little[0] < much[0] / 4
