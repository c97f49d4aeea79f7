"""Workloads: steps, samples and tokens."""

import pytest
from factories import make_config, make_workload

from autotune.values.model import Task
from autotune.values.workload import LengthProfile, OwnCode


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8, 16])
def test_micro_batch_times_accumulation_is_the_global_batch(micro_batch):
    workload, config = make_workload(global_batch_size=16), make_config(micro_batch)
    assert workload.accumulation_steps(config) * micro_batch == 16
    assert workload.samples_per_step(config) == 16


def test_tokens_of_a_sample_are_source_and_target_of_real_ones_their_mean():
    assert make_workload(sequence_length=100).tokens_per_sample == 100
    assert make_workload(sequence_length=100, target_length=20, task=Task.SEQ2SEQ_LM).tokens_per_sample == 120
    lengths = LengthProfile(samples=3, mean=40.5, minimum=1, median=40, p95=90, maximum=99, mean_target=9.5)
    assert make_workload(lengths=lengths).tokens_per_sample == 50
    unknown = make_workload(sequence_length=1, own_code=OwnCode(kind="script", shown="train.py", directory="/"))
    assert (unknown.tokens_per_sample, unknown.shown_length) == (None, "")
    assert make_workload(task=Task.IMAGE_CLASSIFICATION).tokens_per_sample is None
