"""The GPU table: its figures are whole and plausible, names lead to devices, and a device can be had without it."""

import json
import re
from collections import Counter

import pytest
from typer.testing import CliRunner

from autotune.cli.main import app
from autotune.errors import InputError
from autotune.units import GIB
from autotune.values.catalogue import device_of_memory, gpu_named, gpu_of, gpus

TABLE = gpus()


def bare(name: str) -> str:
    return re.sub(r"[\s_/-]+", "", name.lower())


def test_a_name_leads_to_one_device():
    names = Counter(bare(name) for gpu in TABLE for name in {bare(n) for n in (gpu.name, *gpu.aliases)})
    assert [name for name, count in names.items() if count > 1] == []


def test_every_row_is_whole_and_plausible():
    for gpu in TABLE:
        names = (gpu.name, *gpu.aliases)
        assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names), gpu
        assert len({bare(name) for name in names}) == len(names), gpu
        assert 4 <= gpu.memory_gib <= 300, gpu
        assert 100 <= gpu.bandwidth_gb_s <= 20_000, gpu
        assert 5 <= gpu.link.gb_s < gpu.bandwidth_gb_s, gpu
        assert gpu.link.kind.startswith(("NVLink", "PCIe", "Infinity Fabric")), gpu
        assert gpu.vendor in gpu.source, gpu
        assert any(word in gpu.source for word in ("data sheet", "whitepaper", "brochure", "product page")), gpu


def test_peaks_are_dense_and_follow_the_architecture():
    """No device does more than 420 operations per byte of its bandwidth; with sparsity counted, several would."""
    for gpu in TABLE:
        peaks = gpu.peak_tflops
        assert all(4 <= tflops <= 10_000 for tflops in peaks.values()), gpu
        assert gpu.peak_flops["fp16"] / gpu.bandwidth <= 420, gpu
        ladder = [peaks[dtype] for dtype in ("fp32", "tf32", "fp16", "int8") if dtype in peaks]
        assert ladder == sorted(ladder), gpu
        assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"], gpu
        assert peaks.get("fp8", 1e9) >= peaks["fp16"], gpu
        newer = gpu.capability >= (8, 0) if gpu.capability else True
        assert ("bf16" in peaks) == newer, gpu
        assert ("tf32" in peaks) == (newer and (gpu.vendor == "NVIDIA" or gpu.architecture == "CDNA 3")), gpu
        has_fp8 = gpu.capability >= (8, 9) if gpu.capability else gpu.architecture > "CDNA 2"
        assert ("fp8" in peaks) == has_fp8, gpu
        assert (gpu.capability is None) == (gpu.vendor == "AMD"), gpu


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("a100-80gb", ["a100-80gb", "A100 80GB", "a100_sxm4_80gb", "NVIDIA A100-SXM4-80GB"]),
        ("h100-80gb", ["H100", "h100 sxm 80gb"]), ("rtx-4090", ["RTX 4090", "rtx4090", "GeForce RTX 4090", "4090"]),
        ("rtx-a5000", ["A5000 24GB"]), ("rtx-a6000", ["RTX A6000 48 GB"]), ("h100-nvl", ["H100 94GB"]),
        ("mi250x-gcd", ["MI250X"]), ("l40s", ["l40s 48gb"]), ("t4", ["Tesla T4"]),
    ],
)  # fmt: skip
def test_a_device_is_found_however_it_is_written(name, spellings):
    assert [gpu_named(written).name for written in spellings] == [name] * len(spellings)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("rtx-4900", ".*'rtx-4090'"), ("a100", ".*'a100-80gb'"), ("V100", ".*'v100-32gb'"), ("h20O", ".*'h200'"),
        *((never, "") for never in ("A5000 16GB", "a100 64GB", "V100 24 GB")),  # which had other memory
    ],
)  # fmt: skip
def test_an_unknown_device_is_refused_with_the_name_that_was_meant(written, meant):
    with pytest.raises(InputError, match=f"unknown GPU '{written}'{meant}.*; `autotune gpus` lists the table") as error:
        gpu_named(written)
    assert "\n" not in str(error.value)


def test_a_local_device_is_recognised_by_its_drivers_name_and_not_taken_for_another():
    assert [gpu_of(name) for gpu in TABLE for name in gpu.nvml_names] == [g for g in TABLE for _ in g.nvml_names]
    unlike = ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce GTX 1080", "")
    assert [gpu_of(name) for name in unlike] == [None] * 4


def test_a_hypothetical_device_is_idle_and_computes_as_the_table_says():
    for gpu in TABLE:
        hardware = gpu.hardware()
        assert (hardware.kind, hardware.device, hardware.capability) == ("cuda", "cuda:0", gpu.capability)
        assert hardware.memory_bytes == hardware.free_bytes == gpu.memory_bytes
        assert (hardware.has_bf16, hardware.has_tf32) == ("bf16" in gpu.peak_tflops, "tf32" in gpu.peak_tflops)
        assert gpu_of(hardware.name) == gpu
        assert {"torch", "transformers", "triton"} <= set(hardware.versions)
    assert gpu_named("a100-80gb").hardware(memory_bytes=20 * GIB).free_bytes == 20 * GIB


def test_a_size_alone_is_a_device_that_has_bf16():
    hardware = device_of_memory(24 * GIB)
    assert (hardware.name, hardware.capability) == ("a GPU of 24.0 GiB", (8, 0))
    assert hardware.has_bf16
    assert 20 * GIB < hardware.default_budget_bytes < 24 * GIB


def listed(*words: str):
    return CliRunner().invoke(app, ["gpus", *words], env={"COLUMNS": "80"})


def test_the_command_lists_the_table_in_80_columns_or_as_json():
    shown = listed().stdout
    assert max(map(len, shown.splitlines())) <= 80
    rows = json.loads(listed("--json").stdout)
    assert [row["name"] for row in rows] == [gpu.name for gpu in TABLE if f"│ {gpu.name} " in shown]
    assert all(row["source"] for row in rows)


def test_the_command_filters_and_refuses_a_filter_that_matches_nothing_in_one_line(autotune):
    amd = {gpu.name for gpu in TABLE if gpu.vendor == "AMD"}
    for text, shown in (("rtx 4090", {"rtx-4090"}), ("amd", amd), ("l40", {"l40", "l40s"})):
        assert {gpu["name"] for gpu in json.loads(listed(text, "--json").stdout)} == shown
    done = autotune("gpus", "rtx-4900")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "did you mean 'rtx-4090'" in done.stderr
