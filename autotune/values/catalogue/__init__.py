"""The built-in catalogue: configurations of known models (a JSON file per family), the GPU table, and their sources.

Peaks are dense with fp32 accumulation, as training computes: with it GeForce cards since Turing halve the rate of fp16,
and data sheets that assume sparsity show the double. `Hardware` can be made of devices that this machine lacks.
"""

import functools
import importlib.resources
import json
import re
from typing import Any, Literal

from pydantic import Field

from autotune.errors import InputError, suggestion
from autotune.units import GIB
from autotune.value import Value
from autotune.values.hardware import Hardware, detect
from autotune.values.model import Kind, Task

_FOLDER = importlib.resources.files("autotune.values.catalogue")


class CatalogueEntry(Value):
    """A model of the built-in catalogue."""

    family: str
    id: str  # on the hub
    names: tuple[str, ...]  # short names, the first is the preferred one
    model_type: str
    kind: Kind
    config: dict[str, Any]  # keyword arguments of the config class
    parameters: int  # tied ones counted once, buffers not at all
    parameters_from: Literal["published", "counted"]  # counted: computed from the config
    parameters_task: Task | Literal["base"]  # task whose head the count includes; base: none
    source: str  # address of the published config
    quoted_in: str | None = None  # public file that quotes it, as owner/repository@commit:path; None: read at `source`


@functools.cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    entries: list[CatalogueEntry] = []
    for file in sorted((_FOLDER / "models").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            content = json.loads(file.read_text(encoding="utf-8"))
            for model in content["models"]:
                same = model.pop("checkpoints", [])  # ids of other checkpoints that have the same figures
                entry = CatalogueEntry(family=content["family"], **model)
                entries.append(entry)
                for id_ in same:
                    own = {"id": id_, "names": (id_.rpartition("/")[2],), "source": entry.source.replace(entry.id, id_)}
                    entries.append(entry.model_copy(update=own))
    return tuple(entries)


# GPUs

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "int8"]

# Words that people and older drivers leave out of names.
_VENDOR_WORDS = re.compile(r"\b(nvidia|amd|geforce|tesla|instinct)\b")


class Link(Value):
    """The interconnect of the devices of a node."""

    kind: str  # such as 'NVLink 4' or 'PCIe 5.0 x16'
    gb_s: float = Field(gt=0)  # 10^9 bytes per second of a device in one direction, all links together


class Gpu(Value):
    """One device of the table, as a process sees it: one die of a card with two."""

    name: str
    vendor: Literal["NVIDIA", "AMD"]
    architecture: str
    capability: tuple[int, int] | None  # None for AMD
    aliases: tuple[str, ...]  # other spellings, beside case, spaces, underscores and hyphens
    nvml_names: tuple[str, ...]  # in NVML and torch.cuda.get_device_name
    memory_gib: float = Field(gt=0)
    # cuda: a process's, by CUDA or ROCm; driver: nvidia-smi's, 1 to 3 % of it the driver's; nominal: the data sheet's.
    memory_from: Literal["cuda", "driver", "nominal"]
    bandwidth_gb_s: float = Field(gt=0)  # 10^9 bytes per second
    # Dense 10^12 operations per second with fp32 accumulation; fp32 without rounding its factors, so on CUDA cores
    # (AMD: matrix cores); absent: not offered.
    peak_tflops: dict[Dtype, float]
    link: Link  # an entry of `links` in the file
    source: str

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)

    @property
    def bandwidth(self) -> float:
        """Peak memory bandwidth in bytes/s."""
        return self.bandwidth_gb_s * 1e9

    @property
    def peak_flops(self) -> dict[str, float]:
        return {dtype: tflops * 1e12 for dtype, tflops in self.peak_tflops.items()}

    def hardware(self, *, memory_bytes: int | None = None) -> Hardware:
        """Return the hardware of this host with this GPU in it, idle, its memory (or `memory_bytes`) free."""
        host, size = detect("cpu"), self.memory_bytes if memory_bytes is None else memory_bytes
        return Hardware(
            kind="cuda",
            device="cuda:0",
            name=self.nvml_names[0] if self.nvml_names else self.name,
            memory_bytes=size,
            free_bytes=size,
            cores=host.cores,
            host_memory_bytes=host.host_memory_bytes,
            capability=self.capability,
            arithmetic=tuple(self.peak_tflops) if self.capability is None else None,
            cxx=host.cxx,
            versions={"triton": "assumed", **host.versions},  # part of each build of torch for CUDA or ROCm
        )


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    text = (_FOLDER / "gpus.json").read_text(encoding="utf-8")
    return tuple(Gpu(**gpu) for gpu in json.loads(text)["gpus"])


def gpu_named(name: str) -> Gpu:
    """Return the device for a name that a person writes: 'a100-80gb', 'RTX 4090', 'NVIDIA L40S', 'A5000 24GB'."""
    known = {_key(name): gpu for gpu in gpus() for name in (gpu.name, *gpu.aliases, *gpu.nvml_names)}
    if (gpu := known.get(_key(name))) is not None:
        return gpu
    if written := re.fullmatch(r"(.+?)[\s_-]+(\d{1,3})\s*gi?b?", name.strip(), re.IGNORECASE):
        # The one device that a name and its nominal memory leave, of which a process may use up to 12 % less.
        size, exact = int(written[2]), known.get(_key(written[1]))
        alike = (gpu for gpu in gpus() if gpu != exact and _key(gpu.name).startswith(_key(written[1])))
        fitting = [gpu for gpu in (exact, *alike) if gpu is not None and 0.88 * size <= gpu.memory_gib <= size]
        if fitting and (fitting[0] == exact or len(fitting) == 1):
            return fitting[0]
    raise InputError(f"unknown GPU {name!r}{_near(name)}; `autotune gpus` lists the table")


def gpu_of(device_name: str) -> Gpu | None:
    """Return the device for a name that NVML or torch report; None for laptop GPUs, MIG slices and unknown ones."""
    key = _key(device_name)
    return next((gpu for gpu in gpus() if key in map(_key, (gpu.name, *gpu.nvml_names))), None)


def gpus_like(text: str) -> tuple[Gpu, ...]:
    """Return the devices whose names, vendor or architecture contain `text`."""
    found, key = [], _key(text)
    for gpu in gpus():
        names = (gpu.name, *gpu.aliases, *gpu.nvml_names)
        words = " ".join((*names, gpu.vendor, gpu.architecture)).lower()
        if text.lower() in words or (key and any(key in _key(name) for name in names)):
            found.append(gpu)
    if not found:
        raise InputError(f"no GPU of the table is called like {text!r}{_near(text)}; `autotune gpus` lists the table")
    return tuple(found)


def device_of_memory(memory_bytes: int) -> Hardware:
    """Return the hardware of this host with an otherwise unknown GPU of this size, Ampere or newer."""
    unknown = {"name": f"a GPU of {memory_bytes / GIB:.1f} GiB", "capability": (8, 0), "arithmetic": None}
    return gpus()[0].hardware(memory_bytes=memory_bytes).model_copy(update=unknown)


@functools.cache
def _key(name: str) -> str:
    return re.sub(r"[\s/-]+", "", _VENDOR_WORDS.sub("", name.lower().replace("_", " ")))


def _near(name: str) -> str:
    """Return a suggestion for a misspelt name, or for a prefix of several names such as 'a100'."""
    word = re.sub(r"[\s_]+", "-", name.strip())
    names = [gpu.name for gpu in gpus()]
    aliases = [alias for gpu in gpus() for alias in gpu.aliases]
    unfinished = [full for full in names if _key(full).startswith(_key(name))]
    return suggestion(word, unfinished) or suggestion(word, names) or suggestion(word, aliases)
