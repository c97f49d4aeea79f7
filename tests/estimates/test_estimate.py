"""What is estimated is what the cost model says; what fits is counted right; nothing is assumed without a word."""

import itertools

import pytest
import traced_once
from conftest import TINY_LLAMA, write_model
from factories import make_result
from pydantic import TypeAdapter

import autotune
from autotune.cost.family import family_of, shape_of
from autotune.cost.model import CostModel
from autotune.cost.profiler import profile
from autotune.errors import InputError, MachineError, NothingFitsError
from autotune.estimates.estimate import report, shortfall
from autotune.estimates.ranking import BEST
from autotune.estimates.report import ConfigReport, DevicesReport, RankingReport, Report, fit
from autotune.estimates.request import EstimateOptions
from autotune.planning.options import options_of
from autotune.storage.home import add_observations, rates_of
from autotune.training.build import default_task
from autotune.training.resolve import resolve
from autotune.units import GIB
from autotune.values.adapters import LoraAdapter
from autotune.values.catalogue.gpus import gpu_named, gpus, hypothetical
from autotune.values.config import Allowance, TrainConfig, Workload
from autotune.values.estimate import CostEstimate
from autotune.values.hardware import default_budget_bytes, detect
from autotune.values.trial import Interval

GPU = "rtx-3070"  # 7.8 GiB
LORA = {"adapter": "lora", "adapter-rank": "8"}


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch):
    monkeypatch.setattr("autotune.cost.profiler.profile", traced_once.profile)


@pytest.fixture
def estimated(tiny_llama):
    """Return a function that reports on the tiny Llama, unless another model is named."""

    def make(**options) -> Report:
        return report(options_of(EstimateOptions, {"model": str(tiny_llama), "seq_len": 128, "gpu": GPU, **options}))

    return make


def model_of(workload: Workload, config: TrainConfig, gpu: str = GPU) -> CostModel:
    hardware = hypothetical(gpu_named(gpu))
    traced = profile(workload.model, family_of(config, hardware), shape_of(workload))
    return CostModel.of(workload, hardware, rates_of(hardware), [traced])


# One configuration


def test_the_estimate_of_a_configuration_is_that_of_the_cost_model(estimated):
    found = estimated(knobs={"micro-batch": "4", "precision": "bf16", "checkpointing": "full", **LORA})
    config = found.predicted.config
    assert config == TrainConfig(
        per_device_train_batch_size=4,
        precision="bf16",
        checkpointing="full",
        adapter=LoraAdapter(rank=8),
        attn_implementation="sdpa",
    )
    expected = model_of(found.workload, config).estimate(config)
    assert found.predicted.memory == expected.memory
    assert found.predicted.speed.step_time_s == expected.step_time_s
    assert found.predicted.speed.tokens_per_second == expected.tokens_per_second
    assert found.predicted.speed.mfu == expected.mfu
    assert found.predicted.accumulation_steps == 16


@pytest.mark.slow
@pytest.mark.parametrize("model", ["t5-small", "vit-base", "resnet-18"])
@pytest.mark.parametrize("knobs", [{"micro-batch": "8"}, {"micro-batch": "8", "precision": "fp16", "optim": "sgd"}])
def test_the_components_sum_to_the_allocated_peak(estimated, model, knobs):
    if model == "t5-small":  # overflows in fp16
        knobs = {**knobs, "precision": "bf16"}
    memory = estimated(model=model, gpu="a100-80gb", knobs=knobs).predicted.memory
    parts = (
        memory.weights_bytes,
        memory.gradients_bytes,
        memory.optimizer_state_bytes,
        memory.activations_bytes,
        memory.temporaries_bytes,
        memory.communication_bytes,
    )
    assert sum(parts) == pytest.approx(memory.allocated_peak_bytes, abs=len(parts))
    assert memory.allocated_peak_bytes <= memory.reserved_peak_bytes <= memory.device_peak_bytes


def test_intervals_hold_what_is_predicted(estimated):
    speed = estimated(knobs={"micro-batch": "8"}).predicted.speed
    for value, interval in (
        (speed.step_time_s, speed.step_time_interval),
        (speed.samples_per_second, speed.samples_per_second_interval),
        (speed.tokens_per_second, speed.tokens_per_second_interval),
        (speed.mfu, speed.mfu_interval),
    ):
        assert interval.low < value < interval.high
    assert speed.mfu_interval.high <= 1


@pytest.mark.parametrize(
    ("high", "middle", "low", "expected"),
    [(9, 8, 7, "yes"), (11, 9, 8, "probably"), (12, 11, 9, "probably not"), (13, 12, 11, "no")],
)
def test_whether_it_fits_goes_by_the_interval(estimated, high, middle, low, expected):
    memory = estimated(knobs={"micro-batch": "8"}).predicted.memory
    changed = {"device_peak_bytes": middle, "device_interval": Interval(low=low, high=high)}
    assert fit(memory.model_copy(update=changed), 10) == expected


@pytest.mark.slow
def test_a_larger_micro_batch_never_takes_less_memory(estimated):
    sizes = [1, 2, 3, 16, 64]
    found = [estimated(global_batch="any", knobs={"micro-batch": str(size), "precision": "bf16"}) for size in sizes]
    peaks = [one.predicted.memory.allocated_peak_bytes for one in found]
    assert all(below <= above for below, above in itertools.pairwise(peaks))


def test_the_largest_micro_batch_of_a_free_global_batch_fits_and_the_next_does_not(estimated):
    memory_bytes = 3 * GIB
    found = estimated(global_batch="any", memory_bytes=memory_bytes, knobs={"micro-batch": "1"})
    largest = found.largest_micro_batch
    config = found.predicted.config

    def peak(size: int) -> int:
        again = config.model_copy(update={"per_device_train_batch_size": size})
        return model_of(found.workload, config).estimate(again).memory.device_peak_bytes

    assert largest > 1
    assert peak(largest) <= memory_bytes < peak(largest + 1)


def test_the_largest_micro_batch_of_a_given_global_batch_is_on_its_lattice(estimated):
    assert estimated(global_batch=48, knobs={"micro-batch": "4"}).largest_micro_batch == 48
    small = estimated(gpu="t4", model="gpt2", seq_len=512, knobs={"micro-batch": "8"})
    assert small.largest_micro_batch in (8, 16)
    assert small.predicted.fits_at_all


def test_what_does_not_fit_is_a_report_with_the_one_change_that_would(estimated, wide_llama):
    found = estimated(model=str(wide_llama), memory_bytes=3 * GIB, knobs={"micro-batch": "64"})
    assert found.predicted.fits == "no"
    assert found.largest_micro_batch < 64
    assert f"with --micro-batch {found.largest_micro_batch} it takes" in found.would_fit
    error = shortfall(found)
    assert isinstance(error, NothingFitsError)
    assert "rtx-3070 has 3.00 GiB" in str(error)
    assert found.would_fit in str(error)


@pytest.mark.slow
def test_where_no_one_change_would_do_the_device_that_would_is_named(estimated):
    found = estimated(model="gpt2", memory_bytes=1100 << 20, knobs={"micro-batch": "1"})
    assert found.largest_micro_batch is None
    assert "it fits" in found.would_fit
    assert "(--gpu)" in found.would_fit


def test_what_fits_is_no_shortfall(estimated):
    assert shortfall(estimated(knobs={"micro-batch": "1"})) is None
    assert shortfall(estimated()) is None


def test_every_default_is_said(estimated):
    said = " ".join(estimated(seq_len=None, model="t5-small", knobs={"precision": "bf16"}).notes)
    for default in (
        "sequence length 512",
        "target length 512",
        "global batch 64",
        "--micro-batch 8",
        "--optim adamw_torch_fused",
        "--attention sdpa",
        "rtx-3070 as its data sheet has it",
        "meta device",
    ):
        assert default in said
    assert "--precision" not in said


def test_knobs_that_change_nothing_say_so(estimated):
    notes = estimated(knobs={"workers": "4", "pin-memory": False}).notes
    assert any("--workers, --pin-memory changes nothing" in note for note in notes)


def test_flash_attention_is_taken_as_installed_on_a_device_of_the_table(estimated):
    found = estimated(knobs={"attention": "flash_attention_2", "precision": "bf16"})
    assert found.predicted.config.attn_implementation == "flash_attention_2"
    assert "flash-attn taken as installed" in found.notes


def test_an_optimizer_that_nothing_is_known_of_is_said_to_be_taken_as_adamw(estimated):
    assert "nothing is known of galore_adamw: taken as adamw_torch" in estimated(knobs={"optim": "galore_adamw"}).notes


def test_compiling_is_said_to_be_a_rule_of_thumb(estimated):
    assert any("rule of thumb" in note for note in estimated(knobs={"compile": "inductor"}).notes)


REFUSED = {
    "an unknown model": ({"model": "gpt-two"}, "unknown"),
    "an unknown GPU": ({"gpu": "a100"}, "did you mean 'a100-80gb'"),
    "more memory than the GPU has": ({"memory_bytes": 80 * GIB}, "--memory 80.00 GiB: rtx-3070 has"),
    "memory of all GPUs": ({"gpu": "all", "memory_bytes": GIB}, "--memory: with --gpu all"),
    "a GPU and a device": ({"device": "cpu"}, "--device cpu: is of this machine"),
    "an allowance beside a configuration": ({"allow": "exact", "knobs": {"tf32": True}}, "--allow exact: is for a"),
    "an unknown allowance": ({"allow": "all"}, "--allow all"),
    "no samples": ({"global_batch": 0}, "--global-batch 0"),
    "a sequence beyond the positions": ({"seq_len": 257}, "--seq-len 257: tiny-llama has 256 positions"),
    "a target without a decoder": ({"target_len": 8}, "--target-len: the task causal-lm has no decoder targets"),
    "a task without a head": ({"task": "image-classification"}, "has no head for image-classification"),
    "a micro-batch of nothing": ({"knobs": {"micro-batch": "0"}}, "--micro-batch 0: expected a number above 0"),
    "a micro-batch that doesn't divide": ({"knobs": {"micro-batch": "5"}}, "does not divide the global batch of 64"),
    "an optimizer that doesn't exist": ({"knobs": {"optim": "adamw_trch"}}, "did you mean 'adamw_torch'"),
    "an optimizer that is gone": ({"knobs": {"optim": "adamw_hf"}}, "--optim adamw_hf: adamw_hf is gone"),
    "a knob the GPU lacks": ({"gpu": "t4", "knobs": {"precision": "bf16"}}, "not possible on t4: Tesla T4 has no bf16"),
    "a kernel the model lacks": ({"knobs": {"attention": "paged"}}, "llama offers no paged attention"),
    "a compiler nothing is known of": ({"knobs": {"compile": "tvm"}}, "--compile tvm: nothing is predicted for it"),
    "prices without a run": ({"prices": "prices.yaml"}, "--prices prices.yaml: needs --tokens"),
    "prices that aren't there": ({"prices": "nowhere.yaml", "tokens": 1e9}, "nowhere.yaml: No such file"),
    "tokens of images": ({"model": "vit-base", "tokens": 1e9}, "--tokens: google/vit-base"),
    "a knob that no GPU can": ({"gpu": "all", "knobs": {"micro-batch": "5"}}, "not possible on any device"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_can_not_be_used_is_refused_in_one_line(estimated, options, said):
    with pytest.raises(InputError) as error:
        estimated(**options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_device_that_is_not_there_is_refused(estimated):
    with pytest.raises(MachineError, match="cuda:99"):
        estimated(gpu=None, device="cuda:99")


# The best


def test_without_a_knob_the_best_are_ranked(estimated):
    found = estimated()
    assert isinstance(found, RankingReport)
    assert 1 < len(found.best) <= BEST
    assert found.considered >= found.fitting >= len(found.best)
    rates = [one.speed.samples_per_second for one in found.best]
    assert all(later <= 1.011 * earlier for earlier, later in itertools.pairwise(rates))
    kinds = {
        one.config.model_copy(update={"per_device_train_batch_size": 1, "tf32": False}).config_id for one in found.best
    }
    assert len(kinds) == len(found.best)
    assert all(one.memory.device_peak_bytes <= found.device.memory_bytes for one in found.best)
    assert any(note.startswith("not ranked: ") and "--allow optimizer does not admit" in note for note in found.notes)


def test_of_equals_what_changes_the_training_least_comes_first(estimated):
    assert estimated().best[0].config.optim == "adamw_torch_fused"


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


def test_of_a_device_of_which_only_the_memory_is_known_no_speed_is_told(estimated):
    found = estimated(gpu=None, memory_bytes=8 * GIB)
    assert found.device.rates is None
    assert all(one.speed is None for one in found.best)
    assert any("no speed" in note for note in found.notes)


def test_if_nothing_fits_the_nearest_and_the_change_are_told(estimated, wide_llama):
    with pytest.raises(NothingFitsError) as error:
        estimated(model=str(wide_llama), allow="exact", gpu=None, memory_bytes=1060 << 20)
    text = str(error.value)
    assert "--micro-batch 1 --precision fp32" in text
    assert "a GPU has 1.04 GiB" in text
    assert "(--allow " in text
    assert "which fits" in text


def test_the_local_device_has_the_defaults_and_the_budget_of_a_search(tiny_llama):
    found = report(
        options_of(EstimateOptions, {"model": str(tiny_llama), "device": "cpu", "knobs": {"precision": "bf16"}})
    )
    assert found.workload.sequence_length == 128
    assert found.workload.global_batch_size == 16
    assert found.device.hardware.is_cpu
    assert found.device.memory_bytes == pytest.approx(default_budget_bytes(detect("cpu")), rel=0.3)
    assert found.device.rates == "table"
    assert any("autotune doctor --calibrate" in note for note in found.notes)
    limited = report(
        options_of(
            EstimateOptions,
            {"model": str(tiny_llama), "device": "cpu", "memory_bytes": GIB, "knobs": {"precision": "bf16"}},
        )
    )
    assert limited.device.memory_bytes == GIB


def test_what_earlier_searches_measured_corrects_the_estimate(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path))
    options = options_of(EstimateOptions, {"model": str(tiny_llama), "device": "cpu", "knobs": {"micro-batch": "8"}})
    before = report(options)
    config, workload = before.predicted.config, before.workload
    hardware = before.device.hardware
    traced = profile(workload.model, family_of(config, hardware), shape_of(workload))
    model = CostModel.of(workload, hardware, rates_of(hardware), [traced])
    add_observations(hardware, "llama", [model.observation(make_result(config, workload=workload))])
    after = report(options)
    assert "corrected by 1 trial of earlier searches" in after.notes
    assert after.predicted.speed.samples_per_second != before.predicted.speed.samples_per_second


# All devices


@pytest.mark.slow
def test_all_devices_are_compared_with_a_trace_for_each_family(estimated, monkeypatch):
    traced = []

    def counted(spec, family, shape, **options):
        traced.append(family)
        return profile(spec, family, shape, **options)

    monkeypatch.setattr("autotune.cost.profiler.profile", counted)
    found = estimated(gpu="all", model="gpt2", seq_len=512)
    assert isinstance(found, DevicesReport)
    assert {row.device.name for row in found.rows} == {gpu.name for gpu in gpus()}
    assert len(traced) == len(set(traced)) <= 6
    rates = [row.best.speed.samples_per_second for row in found.rows if row.best]
    assert rates == sorted(rates, reverse=True)
    for row in found.rows:
        assert row.best.memory.device_peak_bytes <= row.device.memory_bytes
        assert row.largest_micro_batch >= row.best.config.per_device_train_batch_size


@pytest.mark.slow
def test_a_device_that_can_not_run_the_configuration_says_why(estimated):
    found = estimated(gpu="all", knobs={"precision": "bf16"})
    rows = {row.device.name: row for row in found.rows}
    assert rows["t4"].best is None
    assert rows["t4"].why_not == "it has no bf16 (compute capability 8.0 or newer)"
    assert rows["l4"].best.config.precision == "bf16"


def test_a_device_that_is_too_small_says_what_it_takes(estimated):
    found = estimated(gpu="all", model="gpt2", seq_len=1024, knobs={"micro-batch": "32"})
    rows = {row.device.name: row for row in found.rows}
    assert rows["rtx-3070"].why_not.startswith("the least takes")
    assert rows["h200"].best.config.per_device_train_batch_size == 32


@pytest.mark.slow
def test_a_model_too_large_for_any_device_fits_nothing(estimated, tmp_path):
    giant = {**TINY_LLAMA, "hidden_size": 32768, "intermediate_size": 131072, "num_hidden_layers": 40}
    with pytest.raises(NothingFitsError, match="nothing fits"):
        estimated(gpu="all", model=str(write_model(tmp_path / "giant", giant)), allow="exact")


@pytest.mark.slow
def test_a_run_costs_money_where_a_price_is_known(estimated, tmp_path):
    prices = tmp_path / "prices.json"
    prices.write_text('{"currency": "EUR", "rtx-3070": 0.1}')
    asked = {"tokens": 1e9, "prices": str(prices), "knobs": {"micro-batch": "8"}}
    run = estimated(**asked).run
    assert run.money == pytest.approx(0.1 * run.hours)
    unpriced = estimated(gpu="t4", **asked)
    assert unpriced.run.money is None
    assert any("no price of t4" in note for note in unpriced.notes)
    rows = {row.device.name: row for row in estimated(gpu="all", **asked).rows}
    assert rows["rtx-3070"].run.money == pytest.approx(run.money)
    assert rows["t4"].run.money is None


# As a value, and from Python


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"knobs": {"micro-batch": "8"}}, {}, {"gpu": "all", "knobs": {"precision": "bf16"}}],
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


def test_from_python_it_is_the_same(estimated, tiny_llama):
    found = estimated(knobs={"micro-batch": "8", "precision": "bf16"})
    asked = {"config": found.predicted.config, "gpu": GPU}
    by_name = autotune.estimate(str(tiny_llama), seq_len=128, **asked)
    assert isinstance(by_name, CostEstimate)
    assert by_name.memory == found.predicted.memory
    assert by_name.step_time_s == found.predicted.speed.step_time_s
    assert any("global batch 64" in note for note in by_name.notes)
    by_workload = autotune.estimate(workload=found.workload, **asked)
    assert by_workload.memory == by_name.memory
    assert not any("global batch" in note for note in by_workload.notes)


def test_from_python_contradictions_are_refused(tiny_llama):
    spec = resolve("gpt2")
    workload = Workload(model=spec, task=default_task(spec), sequence_length=64, global_batch_size=8)
    config = TrainConfig(per_device_train_batch_size=8, attn_implementation="sdpa")
    with pytest.raises(InputError, match="needs a model or a workload"):
        autotune.estimate(config=config)
    with pytest.raises(InputError, match="seq_len is part of the workload"):
        autotune.estimate(workload=workload, seq_len=8, config=config)
    with pytest.raises(InputError, match="is not that of the workload"):
        autotune.estimate(str(tiny_llama), workload=workload, config=config)
    with pytest.raises(InputError, match="does not divide"):
        autotune.estimate(workload=workload, config=config.model_copy(update={"per_device_train_batch_size": 3}))
