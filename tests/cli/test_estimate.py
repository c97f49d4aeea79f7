"""`autotune estimate` as people use it: tables of 80 columns, objects with --json, one line for an error."""

import json

import pytest
import traced_once
import typer
from pydantic import TypeAdapter

from autotune.cli.main import app
from autotune.estimates.report import ConfigReport, DevicesReport, RankingReport, Report
from autotune.units import GIB
from autotune.values.catalogue import gpus
from autotune.values.config import TrainConfig

OPTIONS = {
    "--model", "--gpu", "--memory", "--task", "--seq-len", "--target-len", "--global-batch", "--allow", "--tokens",
    "--nodes", "--network-gb-s", "--host-memory", "--device", "--revision", "--trust-remote-code", "--json",
    "--debug", "--help", "--quiet", "--fix", "--devices", "--eval-batch", "--eval-samples", "--explain",
    "--images", "--image-size", "--freeze-vision", "--recipe", "--prompt-len", "--completion-len", "--generations",
}  # fmt: skip


@pytest.fixture
def estimate(command, tiny_llama, monkeypatch):
    """Return a function that runs the command on the tiny Llama in this process, unless --model comes again."""
    monkeypatch.setattr("autotune.cost.profiler.profile", traced_once.profile)
    usual = ("estimate", "--model", tiny_llama, "--seq-len", 128)
    return lambda *arguments: command(*usual, *arguments, env={"COLUMNS": "80"})


def test_options_are_frozen():
    command = typer.main.get_command(app).commands["estimate"]
    params = command.get_params(command.make_context("estimate", ["--model", "gpt2"], resilient_parsing=True))
    assert {o for p in params for o in p.opts if o.startswith("--")} == OPTIONS


def drawn(done, *words: str) -> str:
    """The output of a command that succeeded, in 80 columns, in which all these words are."""
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not [word for word in words if word not in done.stdout]
    return done.stdout


def test_a_configuration_is_drawn_by_component_and_quietly_without_what_was_assumed(estimate):
    words = ("--gpu", "t4", "--fix", "micro-batch=8", "--fix", "optim=adamw_torch")
    said = drawn(
        estimate(*words), "tiny-llama (causal-lm), global batch 64, sequence 128, on t4 of 14.74 GiB",
        "micro-batch 8, precision fp32, optim adamw_torch, attention sdpa", "activations", "allocated at the peak",
        "device, as nvidia-smi shows", "tokens/s", "model FLOP utilisation", "largest micro-batch that fits: 64",
        "note: global batch 64 samples (--global-batch)",
    )  # fmt: skip
    assert estimate(*words, "-q").stdout == said[: said.index("note: ")]


def test_the_best_are_drawn(estimate):
    words = ("configurations compared (--allow optimizer)", "micro-batch 64", "6 P D", "GPU-hours")
    drawn(estimate("--gpu", "rtx-3070", "--tokens", "1B"), *words)
    drawn(estimate("--gpu", "t4", "--devices", "2", "--fix", "micro-batch=8,sharding=none"), "on 2 x t4")
    drawn(estimate("--help"), "KNOB=VALUE of the configuration to estimate.", "Catalogue name")


@pytest.mark.slow
def test_without_a_speed_the_table_has_no_column_for_it(estimate):
    text = drawn(estimate("--memory", "8GiB"), "on a GPU of 8.00 GiB")
    assert not {"tokens/s", "MFU"} & set(text.split())


@pytest.mark.slow
def test_all_devices_are_drawn_with_what_a_run_costs(estimate):
    done = estimate("--gpu", "all", "--tokens", "20B", "--fix", "precision=bf16")
    refused = "not, as it has no bf16 (compute capability 8.0 or newer): p100, "
    drawn(done, "PetaFLOP/s-days", refused, *(gpu.name.split("-")[0] for gpu in gpus()))


def test_images_are_counted_in_samples_and_a_processor_reserves_nothing(estimate, command):
    vit = ("estimate", "--model", "vit-base", "--gpu", "t4", "--fix", "micro-batch=8")
    images = drawn(command(*vit, env={"COLUMNS": "80"}), "samples/s")
    assert "tokens/s" not in images
    assert "sequence" not in images
    assert "reserved" not in drawn(estimate("--device", "cpu", "--fix", "micro-batch=8"), "process")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("--gpu", "t4", "--fix", "micro-batch=8"), ConfigReport),
        pytest.param(("--gpu", "t4"), RankingReport, marks=pytest.mark.slow),
        pytest.param(("--gpu", "all", "--fix", "micro-batch=8"), DevicesReport, marks=pytest.mark.slow),
    ],
)
def test_json_is_the_report(estimate, arguments, kind):
    done = estimate(*arguments, "--json")
    assert done.exit_code == 0
    assert isinstance(TypeAdapter(Report).validate_python(json.loads(done.stdout)), kind)
    assert done.stderr == ""


def test_every_knob_reaches_the_configuration(estimate):
    done = estimate(
        "--gpu", "a100-80gb", "--json", "--fix", "micro-batch=4,precision=bf16,tf32=true,optim=adafactor",
        "--fix", "checkpointing=full,attention=eager,compile=inductor,compile-mode=default",
        "--fix", "adapter=lora,adapter-rank=4,adapter-alpha=8,adapter-dropout=0.1,adapter-target-modules=attention",
        "--fix", "quantization=nf4,workers=2,pin-memory=false,prefetch=4,sampling=sequential,empty-cache=4",
        "--fix", "expandable-segments=true,chunked-loss=true,nan-filter=false",
    )  # fmt: skip
    config = TrainConfig(**json.loads(done.stdout)["predicted"]["config"])
    defaults = TrainConfig(per_device_train_batch_size=8, adapter=type(config.adapter)())
    elsewhere = {"experts_implementation", "experts_per_token", "expert_capacity", "packing", "pad_to_multiple_of"}
    elsewhere |= {"use_liger_kernel", "own", "parallelism", "generation_batch_size", "precompute_ref_log_probs"}
    elsewhere |= {"activation_memory_budget", "non_blocking"}  # the latter is of copies from pinned memory
    given = TrainConfig.model_fields.keys() - elsewhere  # what only other models, data, installations or values have
    assert not [name for name in given if getattr(config, name) == getattr(defaults, name)]
    fields = type(config.adapter).model_fields.keys() - {"kind"}
    assert not [n for n in fields if getattr(config.adapter, n) == getattr(defaults.adapter, n)]


ERRORS = [
    ("--model t5-smal", 2, "did you mean 't5-small'"),
    ("--model broken", 2, "config.json: not valid JSON"),
    ("--gpu rtx-4900", 2, "unknown GPU 'rtx-4900' (did you mean 'rtx-4090'"),
    ("--fix micro-batch=many", 2, "micro-batch=many: expected a whole number"),
    ("--device cpu --fix fp16=true", 2, "fp16 on a CPU silently stays fp32"),
    ("--memory bananas", 2, "--memory bananas"),
    ("--tokens lots", 2, "--tokens lots: expected a number above 0, such as 20B"),
    ("--device cuda:99", 3, "cuda:99"),
    ("--memory 512MiB --allow exact", 5, "nothing fits: micro-batch 1"),
    (f"--gpu t4 --devices {'9' * 25}", 2, f"--devices {'9' * 25}: expected 1048576 or less"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), ERRORS, ids=[case[0] for case in ERRORS])
def test_an_error_is_one_line_and_its_exit_code(estimate, tmp_path, arguments, code, said):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": ')
    done = estimate(*arguments.split())
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert done.stderr.startswith("autotune: ")
    assert said in done.stderr


def test_a_configuration_that_does_not_fit_is_drawn_and_an_error(estimate, wide_llama):
    asked = ("--model", wide_llama, "--gpu", "rtx-3070", "--memory", "3GiB", "--fix", "micro-batch=64")
    done = estimate(*asked)
    assert done.exit_code == 5
    assert "does not fit 3.00 GiB" in done.stdout
    assert "; largest micro-batch that fits: " in " ".join(done.stdout.split())
    assert done.stderr.startswith("autotune: it does not fit: it takes ")
    assert "with --fix micro-batch=" in done.stderr
    document = json.loads(estimate(*asked, "--json").stdout)
    assert document["error"]["exit_code"] == 5
    assert document["predicted"]["fits"] == "no"
    peak = document["predicted"]["memory"]["device_peak_bytes"]
    assert peak > 4 * GIB
    nearly = estimate(*asked[:4], "--memory", f"{(peak >> 20) - 1}MiB", *asked[6:]).stdout
    assert "(chance to fit if unused blocks are given back: " in " ".join(nearly.split())


@pytest.mark.slow
def test_the_true_command_says_nothing_but_the_answer(autotune, tiny_llama):
    done = autotune("estimate", "--model", tiny_llama, "--seq-len", 64, "--gpu", "t4", "--fix", "adapter=lora")
    assert (done.returncode, done.stderr) == (0, "")
    assert "lora rank 16 on all-linear" in " ".join(done.stdout.split())
