"""What fits a device, and what would; what a prediction stands on."""

import re

import pytest
import traced_once
from factories import make_result
from plans import planned

from autotune.cost.family import family_of, shape_of
from autotune.cost.model import CostModel
from autotune.cost.profiler import profile
from autotune.errors import NothingFitsError
from autotune.estimates import fitting
from autotune.estimates.estimate import report, shortfall
from autotune.estimates.fitting import FitAnswer, FitRequest, run_fitting
from autotune.estimates.request import EstimateOptions
from autotune.planning.options import options_of
from autotune.storage.home import add_observations, rates_of
from autotune.units import GIB
from autotune.value import read_value, write_value
from autotune.values.config import Allowance

GPU = "rtx-3070"  # 7.8 GiB


def test_the_largest_micro_batch_of_a_free_global_batch_fits_and_the_next_does_not(estimated):
    memory_bytes = 3 * GIB
    found = estimated(global_batch="any", memory_bytes=memory_bytes, fix={"micro-batch": "1"})
    largest = found.largest_micro_batch

    def peak(size: int) -> int:
        fix = {"micro-batch": str(size)}
        again = estimated(global_batch="any", memory_bytes=memory_bytes, fix=fix)
        return again.predicted.memory.device_peak_bytes

    assert largest > 1
    assert peak(largest) <= memory_bytes < peak(largest + 1)


def test_the_largest_micro_batch_of_a_given_global_batch_is_on_its_lattice(estimated):
    assert estimated(global_batch=48, fix={"micro-batch": "4"}).largest_micro_batch == 48
    small = estimated(gpu="t4", model="gpt2", seq_len=512, fix={"micro-batch": "8"})
    assert small.largest_micro_batch in (8, 16)
    assert small.predicted.fits_at_all


def test_what_does_not_fit_is_a_report_with_the_one_change_that_would(estimated, wide_llama):
    found = estimated(model=str(wide_llama), memory_bytes=3 * GIB, fix={"micro-batch": "64"})
    assert found.predicted.fits == "no"
    assert found.largest_micro_batch < 64
    assert f"with --fix micro-batch={found.largest_micro_batch} it takes" in found.would_fit
    error = shortfall(found)
    assert isinstance(error, NothingFitsError)
    assert "rtx-3070 has 3.00 GiB" in str(error)
    assert found.would_fit in str(error)


def test_where_one_change_is_not_enough_several_are_named_that_fit_together(estimated):
    found = estimated(model="llama-2-7b", gpu="rtx-4090", fix={"micro-batch": "4"})
    (named,) = re.findall(r"with --fix (\S+) \(--allow method\)|with --fix (\S+) it takes", found.would_fit)
    fix = dict(pair.split("=") for pair in next(filter(None, named)).split(","))
    assert len(fix) > 1
    assert estimated(model="llama-2-7b", gpu="rtx-4090", fix=fix).predicted.fits_at_all  # as it can be pasted


def test_what_weights_and_states_alone_rule_out_is_not_traced_to_find_what_would_fit(estimated, monkeypatch):
    """Of 6,700 million weights only packed ones come near 10 GB."""
    asked, trace = [], traced_once.profile

    def counted(spec, family, shape, **options):
        asked.append(family)
        return trace(spec, family, shape, **options)

    monkeypatch.setattr("autotune.cost.profiler.profile", counted)
    found = estimated(model="llama-2-7b", gpu="rtx-3080", fix={"micro-batch": "1"})
    assert "quantization=nf4" in found.would_fit
    assert {family.quantization for family in asked[1:]} == {"nf4"}


@pytest.mark.slow
def test_what_would_fit_has_the_16_bits_that_make_it_much_faster_unless_the_precision_was_given(estimated):
    """A T4 has no bf16, and multiplies in fp16 eight times as fast as in fp32."""
    found = estimated(model="llama-2-7b", gpu="t4", fix={"micro-batch": "1"})
    (fix, times) = re.findall(r"with --fix (\S+) it takes .*, (\S+) times as fast as in fp32", found.would_fit)[0]
    assert "precision=fp16" in fix
    one, half = (
        estimated(model="llama-2-7b", gpu="t4", fix=dict(pair.split("=") for pair in pairs)).predicted
        for pairs in ([p for p in fix.split(",") if p != "precision=fp16"], fix.split(","))
    )
    assert half.fits_at_all
    assert half.samples_per_second / one.samples_per_second == pytest.approx(float(times), abs=0.06)
    given = estimated(model="llama-2-7b", gpu="t4", fix={"micro-batch": "1", "precision": "fp32"})
    assert "precision" not in given.would_fit


def test_what_would_fit_has_the_fastest_micro_batch_that_surely_fits_unless_it_was_given(estimated):
    with pytest.raises(NothingFitsError) as error:
        estimated(model="llama-2-7b", gpu="rtx-4090")
    (named,) = re.findall(r"with --fix (\S+) ", str(error.value))
    fix = dict(pair.split("=") for pair in named.split(","))
    assert int(fix["micro-batch"]) > 1
    by_size = {
        size: estimated(model="llama-2-7b", gpu="rtx-4090", fix={**fix, "micro-batch": str(size)}).predicted
        for size in (1, int(fix["micro-batch"]))
    }
    chosen = by_size[int(fix["micro-batch"])]
    assert chosen.fits == "yes"
    assert chosen.samples_per_second > by_size[1].samples_per_second
    given = estimated(model="llama-2-7b", gpu="rtx-4090", fix={"micro-batch": "1"})
    assert "micro-batch=1," in given.would_fit


@pytest.mark.slow
def test_the_loss_in_chunks_is_named_where_long_samples_have_too_many_logits(estimated):
    long = {"micro-batch": "1", "precision": "bf16", "checkpointing": "full", "adapter": "lora"}
    found = estimated(model="Llama-3.2-1B", gpu="rtx-3080", seq_len=4096, global_batch=8, fix=long)
    assert "chunked-loss=true" in found.would_fit


@pytest.mark.slow
def test_what_is_too_large_for_anything_else_fits_with_weights_in_four_bits(estimated):
    found = estimated(model="llama-3-70b", gpu="h100-80gb", fix={"micro-batch": "1"})
    fix = dict(pair.split("=") for pair in re.findall(r"--fix (\S+)", found.would_fit)[0].split(","))
    assert (fix["adapter"], fix["quantization"]) == ("lora", "nf4")
    for knob in set(fix) - {"adapter", "micro-batch", "precision"}:
        fewer = {name: choice for name, choice in fix.items() if name != knob}
        assert not estimated(
            model="llama-3-70b", gpu="h100-80gb", fix={"micro-batch": "1", **fewer}
        ).predicted.fits_at_all


def test_if_nothing_fits_the_nearest_and_the_change_are_told(estimated, wide_llama):
    with pytest.raises(NothingFitsError) as error:
        estimated(model=str(wide_llama), allow="exact", gpu=None, memory_bytes=1060 << 20)
    text = str(error.value)
    assert text.startswith("nothing fits: micro-batch 1, checkpointing full comes nearest")  # what differs
    assert "a GPU has 1.04 GiB" in text
    assert "(--allow " in text
    assert "which probably fits; as it is, it fits rtx-3070 (--gpu)" in text
    (named,) = re.findall(r"with --fix (\S+) ", text)
    fix = dict(pair.split("=") for pair in named.split(","))
    assert estimated(model=str(wide_llama), gpu=None, memory_bytes=1060 << 20, fix=fix).predicted.fits_at_all


def test_what_earlier_searches_measured_corrects_the_estimate(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path))
    options = options_of(EstimateOptions, {"model": str(tiny_llama), "device": "cpu", "fix": {"micro-batch": "8"}})
    before = report(options)
    config, workload = before.predicted.config, before.workload
    hardware = before.device.hardware
    traced = profile(workload.model, family_of(config, hardware), shape_of(workload))
    model = CostModel.of(workload, hardware, rates_of(hardware), [traced])
    add_observations(hardware, "llama", [model.observation(make_result(config, workload=workload))])
    after = report(options)
    assert "corrected by 1 trial of earlier searches" in after.notes
    assert after.predicted.speed.samples_per_second != before.predicted.speed.samples_per_second


def test_the_answer_names_the_change_that_fits_though_the_search_may_not_make_it(wide_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "read_observations", lambda *_: ())  # those of other tests
    plan = planned(model=str(wide_llama), allow=Allowance.EXACT, memory="90MiB")
    traced = profile(plan.workload.model, family_of(plan.baseline, plan.hardware), shape_of(plan.workload))
    write_value(
        FitRequest(plan=plan, rates=rates_of(plan.hardware), profiles=(traced,), configs=tuple(plan.every_config())),
        tmp_path / "request.json",
    )
    run_fitting(tmp_path)
    text = read_value(FitAnswer, tmp_path / "answer.json").text
    assert text.startswith("nothing fits: ")
    assert " comes nearest and takes " in text
    assert "with --fix " in text
    assert "(--allow " in text
