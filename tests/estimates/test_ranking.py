"""Rankings of a device's configurations and of all devices; notes name the values that are left out, and why."""

import itertools
from collections import Counter

import pytest
from factories import make_gpu, make_space

from autotune.cost.profiler import profile
from autotune.estimates.estimate import BEST, left_out
from autotune.estimates.report import DevicesReport, RankingReport
from autotune.values.catalogue import gpus
from autotune.values.config import Allowance

PARAMETERS = {
    "precision": ["bf16", "fp32", "pure_bf16"], "tf32": [True, False], "optim": ["adamw_torch_fused", "adafactor"],
    "adapter": [None, "lora"], "dataloader_num_workers": [0, 2],
}  # fmt: skip


def test_values_that_are_left_out_are_named_together_with_the_reason():
    def lines(hardware):
        return left_out(make_space(PARAMETERS, hardware=hardware, allowance=Allowance.OPTIMIZER))

    reason = "changes the method of the training, which --allow optimizer does not admit"
    assert f"not ranked: precision=pure_bf16, adapter=lora: {reason}" in lines(make_gpu())
    of_t4, bf16 = lines(make_gpu(name="Tesla T4", capability=(7, 5))), "precision=bf16, precision=pure_bf16"
    assert f"not ranked: {bf16}: Tesla T4 has no bf16 (compute capability 8.0 or newer)" in of_t4
    assert "not ranked: tf32=true: Tesla T4 has no tf32 (Ampere or newer)" in of_t4


def test_without_a_knob_the_best_are_ranked(estimated):
    found = estimated()
    assert isinstance(found, RankingReport)
    assert 1 < len(found.best) <= BEST
    assert found.considered >= found.fitting >= len(found.best)
    rates = [one.speed.samples_per_second for one in found.best]
    assert all(later <= 1.011 * earlier for earlier, later in itertools.pairwise(rates))
    alike = {"per_device_train_batch_size": 1, "tf32": False}
    assert len({one.config.model_copy(update=alike) for one in found.best}) == len(found.best)
    assert all(one.memory.device_peak_bytes <= found.device.memory_bytes for one in found.best)
    assert any(note.startswith("not ranked: ") and "--allow optimizer does not admit" in note for note in found.notes)
    assert found.best[0].config.optim == "adamw_torch_fused"  # which of equals changes the training least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allow", "precisions"),
    [("exact", {"fp32"}), ("numerics", {"fp32", "bf16"}), ("method", {"fp32", "bf16", "pure_bf16"})],
)
def test_a_ranking_stays_within_the_allowance(estimated, allow, precisions):
    found = estimated(allow=allow)
    assert found.allowance == Allowance(allow)
    assert {str(one.config.precision) for one in found.best} <= precisions
    changes_the_method = [one for one in found.best if one.config.precision == "pure_bf16" or one.config.adapter]
    assert bool(changes_the_method) == (allow == "method")
    other_optimizers = {one.config.optim for one in found.best} - {"adamw_torch", "adamw_torch_fused"}
    assert bool(other_optimizers) == (allow == "method")


@pytest.mark.slow
def test_all_devices_are_compared_with_a_trace_for_each_family_and_generation(estimated, monkeypatch):
    traced = []

    def counted(spec, family, shape, **options):
        traced.append(family)
        return profile(spec, family, shape, **options)

    monkeypatch.setattr("autotune.cost.profiler.profile", counted)
    found = estimated(gpu="all", model="gpt2", seq_len=512)
    assert isinstance(found, DevicesReport)
    assert {row.device.name for row in found.rows} == {gpu.name for gpu in gpus()}
    assert len(traced) == len(set(traced))
    assert max(Counter(family.generation for family in traced).values()) <= 6
    rates = [row.best.speed.samples_per_second for row in found.rows if row.best]
    assert rates == sorted(rates, reverse=True)
    for row in found.rows:
        assert row.best.memory.device_peak_bytes <= row.device.memory_bytes
        assert row.largest_micro_batch >= row.best.config.per_device_train_batch_size


@pytest.mark.slow
def test_a_device_that_can_not_run_the_configuration_says_why(estimated):
    found = estimated(gpu="all", fix={"precision": "bf16"})
    rows = {row.device.name: row for row in found.rows}
    assert rows["t4"].best is None
    assert rows["t4"].why_not == "it has no bf16 (compute capability 8.0 or newer)"
    assert rows["l4"].best.config.precision == "bf16"


def test_a_device_that_is_too_small_says_how_much_it_takes(estimated, wide_llama):
    found = estimated(gpu="all", model=str(wide_llama), global_batch=512, fix={"micro-batch": "512"})
    rows = {row.device.name: row for row in found.rows}
    assert rows["rtx-3070"].why_not.startswith("the least takes")
    assert rows["h200"].best.config.per_device_train_batch_size == 512
