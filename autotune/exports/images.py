"""A container image that trains with the answer: the script with a plain Trainer, and the versions that measured it.

No container runs while this is tested: syntax and schema are checked, and that the versions are those of the answer.
"""

from __future__ import annotations

from typing import Any

import yaml

from autotune.exports import scripts
from autotune.exports.draft import Draft
from autotune.exports.templating import rendered, word
from autotune.exports.winner import Winner
from autotune.units import visible
from autotune.values.optimizers import OPTIMIZERS

DOCKERFILE, COMPOSE, REQUIREMENTS = "Dockerfile", "compose.yaml", "requirements.txt"

# Where torch's builds without CUDA are.
_CPU_WHEELS = "https://download.pytorch.org/whl/cpu"

# Of `Hardware.versions`, what every training needs, and what by a knob alone.
_ALWAYS = ("torch", "transformers", "accelerate")
_FLASH = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}

# Where the answer doesn't say which Python measured it.
_PYTHON = "3.11"


def dockerfile(winner: Winner) -> Draft:
    """Return an image's files."""
    script = scripts.python(winner)
    command = ["python", scripts.TRAIN] if len(script.launch[0].split()) <= 3 else _words(script.launch[0])
    context = {
        "promise": winner.promise,
        "title": winner.workload.model.name,
        "python": _python(winner),
        "compiles": winner.config.torch_compile_backend is not None or OPTIMIZERS[winner.config.optim].compiles,
        "environment": _environment(script.launch[0]),
        "command": command,
    }
    files = {
        DOCKERFILE: rendered("Dockerfile.j2", context),
        COMPOSE: _compose(winner),
        REQUIREMENTS: _requirements(winner),
        **script.files,
    }
    return Draft(files, ("docker compose run --build train",), script.lost)


def _words(line: str) -> list[str]:
    return [word for word in line.split() if "=" not in word or word.startswith("-")]


def _environment(line: str) -> dict[str, str]:
    """Return the variables that a command line sets in front; which devices there are is compose's to say."""
    told = dict(word.split("=", 1) for word in line.split() if "=" in word and not word.startswith("-"))
    return {name: value for name, value in told.items() if name != "CUDA_VISIBLE_DEVICES"}


def _python(winner: Winner) -> str:
    version = winner.result.hardware.versions.get("python")
    return ".".join(version.split(".")[:2]) if version else _PYTHON


def _packages(winner: Winner) -> list[str]:
    """Return the distributions that the answer's training imports."""
    config = winner.config
    wanted = [*_ALWAYS]
    wanted += ["peft"] if winner.peft_arguments is not None else []
    wanted += ["bitsandbytes"] if config.quantization is not None else []
    wanted += [package] if (package := OPTIMIZERS[config.optim].package) is not None else []
    wanted += [_FLASH[config.attn_implementation]] if config.attn_implementation in _FLASH else []
    wanted += ["liger-kernel"] if config.use_liger_kernel else []
    wanted += ["deepspeed"] if config.parallelism.sharding.startswith("zero") else []
    return list(dict.fromkeys(wanted))


def _requirements(winner: Winner) -> str:
    versions = winner.result.hardware.versions
    lines = [f"# What measured {visible(winner.promise)}."]
    if "+cpu" in versions.get("torch", ""):
        lines.append(f"--extra-index-url {_CPU_WHEELS}")
    for package in _packages(winner):
        pinned = package in versions
        lines.append(f"{package}=={word(versions[package])}" if pinned else f"{package}  # its version wasn't recorded")
    return "".join(f"{line}\n" for line in lines)


def _compose(winner: Winner) -> str:
    service: dict[str, Any] = {
        "build": ".",
        "init": True,
        "volumes": ["./out:/workspace/out", "huggingface:/root/.cache/huggingface"],
    }
    if not winner.result.hardware.is_cpu:
        count = winner.config.parallelism.world_size
        device = {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    if winner.config.parallelism.world_size > 1 or winner.config.dataloader_num_workers:
        service["ipc"] = "host"  # processes that hand tensors over need more shared memory than the usual 64 MB
    document = {"services": {"train": service}, "volumes": {"huggingface": {}}}
    return f"# docker compose run --build train\n{yaml.safe_dump(document, sort_keys=False)}"
