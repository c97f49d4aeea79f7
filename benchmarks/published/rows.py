"""The rows of `ground_truth.jsonl`: published measurements as their sources state them, one JSON object a line.

An absent field means that the source doesn't say. What a row's free text means is `setups`' business.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autotune.errors import InputError, located


class NotPredicted(Exception):
    """A row that is passed over, with the reason."""


class Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    group: str
    tier: str = "C"
    kind: str = ""
    date: str = ""
    gpu: str = ""
    gpu_mem_gb: float | None = None
    n_gpus: int | None = None
    model: str = ""
    task: str = ""
    seq_len: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    precision: str = ""
    optimizer: str = ""
    grad_ckpt: bool | str | None = None
    attn: str = ""
    peft: str = ""
    quant: str = ""
    kernels: str = ""
    compile: bool | str | None = None
    distributed: str = ""
    offload: str = ""
    framework: str = ""
    versions: str = ""
    outcome: str = ""
    peak_mem_bytes: float | None = None
    mem_how: str = ""
    throughput: float | None = None
    throughput_unit: str = ""
    time: float | None = None
    time_unit: str = ""
    mem_other: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _absent(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given

    @property
    def ran(self) -> bool:  # otherwise it ran out of memory, as far as the source tells
        return not self.outcome.upper().startswith(("OOM", "FAILED", "NOT RUNNABLE"))

    @property
    def allocated_bytes(self) -> float | None:
        """The peak that torch's allocator had handed out, if that was measured."""
        how = self.mem_how.lower()
        return self.peak_mem_bytes if "allocated" in how and "nvml" not in how else None

    @property
    def reserved_bytes(self) -> float | None:
        """The peak that torch's allocator had reserved, if that was measured."""
        how = self.mem_how.lower()
        return self.peak_mem_bytes if "max_memory_reserved" in how or "reserved_bytes" in how else None

    @property
    def device_bytes(self) -> float | None:
        """The peak of the device as the driver shows it, if that was measured."""
        smi = self.mem_other.get("nvidia_smi_peak_MiB_avg_over_gpus")
        if smi is not None and self.allocated_bytes is not None:
            return float(smi) * 2**20
        return self.peak_mem_bytes if self.mem_how.startswith(("NVML device", "nvidia-smi")) else None


def load_rows(path: Path) -> list[Row]:
    """Return the rows of a file; `InputError` if it can't be read, or a line isn't a row."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(Row.model_validate_json(line))
        except ValidationError as error:
            raise InputError(f"{path}:{number}: not a row: {located(error)}") from error
    return rows
