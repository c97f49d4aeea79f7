"""What the files of axolotl and LLaMA-Factory have in common."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata

import pytest
import yaml
from exporting import drafted
from packaging.requirements import Requirement


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("axolotl", "axolotl train axolotl.yaml --launcher torchrun -- --nproc_per_node 2"),
        ("llama-factory", "FORCE_TORCHRUN=1 NPROC_PER_NODE=2 llamafactory-cli train llama_factory.yaml"),
    ],
)
def test_several_devices_are_started_by_each_tools_own_launcher(target, line):
    made = drafted(target, parallelism={"world_size": 2, "ddp_bucket_cap_mb": 50})
    assert made.launch == (line,)
    assert yaml.safe_load(next(iter(made.files.values())))["ddp_bucket_cap_mb"] == 50


def test_deepspeeds_file_lies_beside_the_one_that_names_it():
    for target in ("axolotl", "llama-factory"):
        files = drafted(target, parallelism={"world_size": 2, "sharding": "zero_3"}).files
        (named,) = [name for name in files if name.endswith(".json")]
        assert yaml.safe_load(files[next(iter(files))])["deepspeed"] == named == "deepspeed.json"


def test_what_tools_have_fields_for_is_carried():
    own = {"num_train_epochs": 5.0, "save_steps": 77, "logging_steps": 9, "neftune_noise_alpha": 5.0}
    for target in ("axolotl", "llama-factory"):
        made = drafted(target, own=own)
        document = yaml.safe_load(next(iter(made.files.values())))
        assert made.lost == ()
        assert document["num_epochs" if target == "axolotl" else "num_train_epochs"] == 5.0
        assert {name: document[name] for name in ("save_steps", "logging_steps", "neftune_noise_alpha")} == {
            "save_steps": 77, "logging_steps": 9, "neftune_noise_alpha": 5.0
        }  # fmt: skip


@pytest.mark.parametrize(("target", "tool"), [("axolotl", "axolotl"), ("llama-factory", "LLaMA-Factory")])
def test_a_file_says_which_versions_its_tool_requires(target, tool):
    """In the metadata of its package, where that is installed."""
    (text,) = drafted(target).files.values()
    heading = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    said = re.search(rf"{tool} ([\d.]+) requires (.*?) \(.*?\): not what was measured with", heading)
    assert said is not None
    package = tool.lower().replace("-", "")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert said[1] == metadata.version(package)
    required = {r.name: r.specifier for r in map(Requirement, metadata.requires(package) or []) if r.marker is None}
    for name in ("transformers", "torch", "accelerate", "peft"):
        bounds = re.findall(r"[\d.]+\d", re.split(rf"{name} ", said[2])[1].split(",")[0].split(" and ")[0])
        assert bounds
        assert all(required[name].contains(bound) for bound in bounds), name
