"""A container image that trains with the answer: the script with a plain Trainer, and the versions that measured it.

Tests run no container: they check syntax and schema, and that the versions are those of the answer.
"""

from __future__ import annotations

import itertools
import shlex
from typing import Any

import yaml

from autotune.exports import scripts
from autotune.exports.templating import rendered, word
from autotune.exports.winner import Draft, Winner
from autotune.units import visible
from autotune.values.model import FLASH_PACKAGES
from autotune.values.optimizers import OPTIMIZERS

# torch's builds without CUDA.
_CPU_WHEELS = "https://download.pytorch.org/whl/cpu"

# Where the answer doesn't say which Python measured it.
_PYTHON = "3.11"


def dockerfile(winner: Winner) -> Draft:
    """Return an image's files."""
    script, version = scripts.python(winner), winner.result.hardware.versions.get("python")
    words = script.launch[0].split()
    variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    command = words[len(variables) :]
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # compose.yaml says which devices there are
    context = {
        "winner": winner,
        "python": ".".join(version.split(".")[:2]) if version else _PYTHON,
        "compiles": winner.config.torch_compile_backend is not None or OPTIMIZERS[winner.config.optim].compiles,
        "environment": variables,
        "mount": (path := _mounted(winner)) and shlex.join(["--volume", f"{path}:{path}:ro"]),
        "command": command,
    }
    files = {
        "Dockerfile": rendered("Dockerfile.j2", context),
        "compose.yaml": _compose(winner),
        "requirements.txt": _requirements(winner),
        **script.files,
    }
    return Draft(files, ("docker compose run --build train",), script.lost)


def _packages(winner: Winner) -> list[str]:
    """Return the distributions that the answer's training imports."""
    config = winner.config
    wanted = ["torch", "transformers", "accelerate"]
    wanted += ["peft"] if winner.peft_arguments is not None else []
    wanted += ["bitsandbytes"] if config.quantization is not None else []
    wanted += [package] if (package := OPTIMIZERS[config.optim].package) is not None else []
    wanted += [FLASH_PACKAGES[config.attn_implementation]] if config.attn_implementation in FLASH_PACKAGES else []
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
    if model := _mounted(winner):
        # At its own path, by which the script finds it; Compose reads `$$` as `$`.
        path = model.replace("$", "$$")
        service["volumes"].append({"type": "bind", "source": path, "target": path, "read_only": True})
    ranks = winner.config.parallelism.world_size
    if not winner.result.hardware.is_cpu:
        device = {"driver": "nvidia", "count": ranks, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    if ranks > 1 or winner.config.dataloader_num_workers:
        service["ipc"] = "host"  # processes that hand tensors over need more shared memory than the usual 64 MB
    document = {"services": {"train": service}, "volumes": {"huggingface": {}}}
    heading = "# docker compose run --build train\n"
    if model:
        heading += "# On another machine, `source` is where that has the model.\n"
    return f"{heading}{yaml.safe_dump(document, sort_keys=False)}"


def _mounted(winner: Winner) -> str | None:
    """Return the model's directory on this machine, which the container is given; None for a model of the hub."""
    return winner.reference if winner.workload.model.source == "directory" else None
