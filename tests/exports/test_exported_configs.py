"""The files of other trainers, read by their own parsers, where these are installed (docs/exports.md says how)."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from exporting import CPU, answer_with, drafted
from packaging.requirements import Requirement

from autotune.exports.targets import draft

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("default")  # the imports of others

ANSWERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16", "tf32": True, "optim": "paged_adamw_8bit"},
    "pure-bf16": {"precision": "pure_bf16", "optim": "adafactor", "checkpointing": "reentrant"},
    "fp16": {"precision": "fp16", "checkpointing": "full", "use_liger_kernel": True},
    "compiled": {"torch_compile_backend": "inductor", "torch_compile_mode": "max-autotune", "precision": "bf16"},
    "lora": {"adapter": {"kind": "lora", "dropout": 0.1}, "precision": "bf16", "attn_implementation": "eager"},
    "dora": {"adapter": {"kind": "dora", "target_modules": "attention"}, "precision": "bf16"},
    "rslora": {"adapter": {"kind": "rslora"}, "precision": "bf16"},
    "qlora": {"adapter": {"kind": "lora"}, "quantization": "nf4-double", "precision": "bf16"},
    "int8": {"adapter": {"kind": "lora"}, "quantization": "int8", "precision": "fp16"},
    "flash": {"attn_implementation": "flash_attention_2", "precision": "bf16", "packing": True},
    "data": {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4},
    "by-length": {"train_sampling_strategy": "group_by_length"},
    "own": {"own": {"learning_rate": 1e-4, "lr_scheduler_type": "cosine", "warmup_steps": 10, "weight_decay": 0.01}},
    "run": {"own": {"num_train_epochs": 5.0, "save_steps": 77, "logging_steps": 9, "neftune_noise_alpha": 5.0,
                    "warmup_steps": 0.1, "max_steps": 50, "save_total_limit": 2, "report_to": ["tensorboard"],
                    "accelerator_config": {"split_batches": False}, "eval_strategy": "steps", "data_seed": 7}},
    "ddp": {"parallelism": {"world_size": 2}},
    "fsdp": {"parallelism": {"world_size": 2, "sharding": "fsdp_full"}, "precision": "bf16", "checkpointing": "full"},
    "offload": {"checkpointing": "offload"},
    "experts": {"experts_implementation": "grouped_mm"},
}  # fmt: skip


def ranks(name: str) -> int:
    return ANSWERS[name].get("parallelism", {}).get("world_size", 1)


def document(target: str, **answer: Any) -> dict[str, Any]:
    (text,) = drafted(target, **answer).files.values()
    return yaml.safe_load(text)


@pytest.mark.parametrize("name", list(ANSWERS))
def test_axolotl_reads_its_file(name):
    pytest.importorskip("axolotl.utils.schemas.config")
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args

    written = document("axolotl", **ANSWERS[name])
    for plugin in written.get("plugins", []):
        PluginManager.get_instance().register(plugin)
    _, schema = merge_input_args()
    read = schema(**written)
    assert not set(written) - set(schema.model_fields)  # what it doesn't know, it lets pass
    assert read.attn_implementation == written["attn_implementation"]
    assert (read.micro_batch_size, read.gradient_accumulation_steps) == (4, 4 // ranks(name))
    assert read.sequence_len == 128
    assert bool(read.sample_packing) is False
    assert not read.lora_mlp_kernel


@pytest.mark.parametrize("name", list(ANSWERS))
def test_llama_factory_reads_its_file(name, tmp_path, monkeypatch):
    parser = pytest.importorskip("llamafactory.hparams.parser")
    written = document("llama-factory", **{**ANSWERS[name], "tf32": False}, hardware=CPU)  # which a GPU alone has
    monkeypatch.chdir(tmp_path)
    model, data, training, method, _ = parser._parse_train_args(written)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 4 // ranks(name))
    assert data.cutoff_len == 128
    assert model.disable_gradient_checkpointing == ("checkpointing" not in ANSWERS[name])
    assert method.finetuning_type == ("lora" if "adapter" in ANSWERS[name] else "full")


@pytest.mark.parametrize("name", list(ANSWERS))
def test_sft_config_takes_its_arguments(name, tmp_path):
    trl = pytest.importorskip("trl")
    ours = {**ANSWERS[name], "hardware": CPU}
    ours = {key: value for key, value in ours.items() if key not in ("parallelism", "tf32")}
    if ours.get("precision") == "fp16":
        pytest.skip("TrainingArguments takes fp16 on a GPU alone")
    (source,) = draft(answer_with(**ours), "trl").files.values()
    (told,) = [
        n.value for n in ast.parse(source).body if isinstance(n, ast.Assign) and n.targets[0].id == "SFT_ARGUMENTS"
    ]
    arguments = trl.SFTConfig(str(tmp_path), **ast.literal_eval(told))
    assert arguments.bf16 == (ours.get("precision") == "bf16")
    assert bool(arguments.activation_checkpointing) == ("checkpointing" in ours)
    assert bool(arguments.gradient_checkpointing) == ("checkpointing" in ours)


def test_compose_files_are_what_the_specification_allows():
    compose_spec = pytest.importorskip("compose_spec")
    for text in (drafted("dockerfile").files["compose.yaml"], (ROOT / "compose.yaml").read_text()):
        compose_spec.ComposeSpecification.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize("compiled", [True, False])
def test_dockerfiles_have_nothing_that_hadolint_minds(compiled, tmp_path):
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    backend = "inductor" if compiled else None
    exported = answer_with(torch_compile_backend=backend).export("dockerfile", tmp_path).paths[0]
    done = subprocess.run([hadolint, str(exported), str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_has_all_that_autotune_imports_in_versions_that_it_takes():
    lines = (ROOT / "docker/constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement
