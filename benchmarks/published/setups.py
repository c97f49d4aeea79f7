"""From a published row to what was run: the model, its family, its inputs, the software of that time, the device.

Rows are read by what they say; what a project's code decides without the row's saying so is written here with its
source. A row that says too little, or something that isn't predicted, raises :class:`NotPredicted` with the reason.

Several devices: fms-acceleration has torch's first FSDP through accelerate 1.0, `TRANSFORMER_BASED_WRAP`, frozen
weights kept as loaded, trained ones in fp32 under autocast (`Accelerator.prepare_model`). fsdp_qlora has the same FSDP
in bf16, packed weights stored as bf16 so that they are sharded too (`train.py`). Tables of the DeepSpeed autotuner:
ZeRO by stage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from autotune.cost.family import Family, Shape
from autotune.cost.optimizers import OPTIMIZERS
from autotune.cost.sharding import Spread
from autotune.errors import InputError
from autotune.values.catalogue import Gpu, gpu_named
from autotune.values.config import Parallelism, Sharding
from autotune.values.model import ModelSpec, Task
from published.models import gptq_group, model_named
from published.quantized import Quantization
from published.rows import NotPredicted, Row
from published.software import Software, Version

# AdamW in a loop over the weights: transformers' own, and torch's before foreach was its default. Neither runs today.
_LOOP = "adamw of a loop"
OPTIMIZERS[_LOOP] = replace(OPTIMIZERS["adamw_torch"], temporaries="loop")

# Whose code ran: the plain libraries, the libraries with kernels patched in, or other model code.
Origin = Literal["plain", "patched", "other"]

# What was current when a row was measured that doesn't name its versions: (month, transformers, torch), by the dates of
# the releases on PyPI.
_RELEASES: tuple[tuple[str, Version, Version], ...] = (
    ("2020-01", (4, 0), (1, 7)),
    ("2021-06", (4, 6), (1, 8)),
    ("2021-11", (4, 12), (1, 10)),
    ("2022-01", (4, 15), (1, 10)),
    ("2022-07", (4, 20), (1, 12)),
    ("2023-01", (4, 25), (1, 13)),
    ("2023-05", (4, 29), (2, 0)),
    ("2023-10", (4, 34), (2, 1)),
    ("2024-04", (4, 40), (2, 2)),
    ("2024-10", (4, 45), (2, 4)),
    ("2025-02", (4, 48), (2, 6)),
    ("2025-06", (4, 52), (2, 7)),
)

# What a row's `distributed` begins with.
_SHARDINGS: tuple[tuple[str, Sharding], ...] = (
    ("FSDP FULL_SHARD", "fsdp_full"),
    ("FSDP NO_SHARD", "none"),
    ("baseline vanilla HF DDP", "none"),
)
_STAGES: dict[str, Sharding] = {"0": "none", "1": "zero_1", "2": "zero_2", "3": "zero_3"}

_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Setup:
    spec: ModelSpec
    family: Family
    shape: Shape
    software: Software
    optim: str
    micro_batch: int
    accumulation: int
    gpu: Gpu
    origin: Origin
    technique: str  # in a word or two, for the report
    spread: Spread
    keeps_gradients: bool  # whether they were set to zero and not freed between steps, as before torch 2.0
    embeddings_in_8_bits: bool  # whether an 8-bit optimizer treated them as other weights

    @property
    def devices(self) -> int:
        return self.spread.parallelism.world_size


def setup_of(row: Row) -> Setup:
    """Return what was run; `NotPredicted` where the row doesn't tell, or its memory isn't predicted."""
    _check(row)
    return read(row)


def read(row: Row) -> Setup:
    """Return what was run, whether or not its memory was measured; `NotPredicted` where the row doesn't tell."""
    spec = model_named(row.model)
    if spec is None:
        raise NotPredicted(f"figures of the model unknown: {row.model}")
    transformers, torch_version = _versions(row)
    named = re.search(r"framework_config=(\S+)", row.framework)
    patched = named.group(1) if named else "none"  # which of a framework's patches were on
    other = row.framework.startswith(("lit-gpt", "torchao"))
    dtype, autocast = _precision(row)
    kernels = "foak" in patched
    quantization = _quantization(row, dtype)
    lora = _lora(row, spec)
    checkpointed = row.grad_ckpt is True or str(row.grad_ckpt).lower().startswith("full")
    software = Software(
        transformers=(99,) if other else transformers,
        torch=torch_version,
        fast_loss=kernels and "liger" not in patched,
        fast_norm=kernels,
        fast_rope=kernels,
        linear_loss="liger" in patched,
        fused_lora=kernels and quantization is not None,
        autocast=autocast is not None,
        quantization=quantization,
        upcast=_upcast(row, patched, quantization, autocast),
        lora=lora,
        lora_in_base_dtype=row.framework.startswith("lit-gpt") and autocast is None,
        checkpointing=checkpointed,
        reentrant=not row.group.startswith("fsdp_qlora"),
        # Whether torch's first FSDP held the inputs of layers, and their gradients, until the backward pass ended. Of a
        # unit without trained weights it registers `register_multi_grad_hook` on the inputs, which refer to the hook,
        # and the hook to them; under reentrant checkpointing these are leaves, whose gradients stay with them
        # (`_register_post_backward_reshard_only_hook`, removed in `_finalize_params`).
        holds_inputs=lora is not None and (row.n_gpus or 0) > 1 and row.group == "fms_acceleration",
    )
    family = Family(
        device="cuda",
        dtype=dtype,
        autocast=autocast,
        checkpointing="full" if checkpointed else "none",
        attn_implementation=_attention(row),
    )
    return Setup(
        spec=spec,
        family=family,
        shape=Shape(task=_task(row, spec), length=row.seq_len or 1),
        software=software,
        optim=_optimizer(row, torch_version),
        micro_batch=row.micro_batch or 1,
        accumulation=row.grad_accum or 1,
        gpu=_gpu(row),
        origin="other" if other else "patched" if patched not in ("none", "baseline-peft-bnb") else "plain",
        technique=_technique(row, software),
        spread=_spread(row, mixed=autocast is not None),
        keeps_gradients=torch_version < (2,),
        embeddings_in_8_bits=any(words in row.optimizer for words in ("no override", "not shown", "Adam8bit")),
    )


def _check(row: Row) -> None:
    if not row.n_gpus:
        raise NotPredicted("no training run")
    if row.group == "deepspeed_autotune":
        raise NotPredicted("memory of the device not stated")
    if row.n_gpus > 1 and row.group.startswith(("litgpt", "torchao")):
        raise NotPredicted("several devices, other model code")
    if row.kind in ("component", "throughput") or not (row.outcome and row.micro_batch):
        raise NotPredicted("one component alone" if row.kind == "component" else "nothing about memory")
    if row.n_gpus == 1 and row.distributed not in ("", "none"):
        raise NotPredicted("sharded or offloaded: " + row.distributed)
    if row.n_gpus == 1 and row.offload not in ("", "none"):
        raise NotPredicted("offloaded to the host")
    if isinstance(row.grad_ckpt, str) and not row.grad_ckpt.lower().startswith(("full", "none")):
        raise NotPredicted("checkpointing not modelled: " + row.grad_ckpt)
    if row.compile not in (None, False, "eager"):
        raise NotPredicted("compiled: what is kept is the compiler's choice")
    if "Adapter" in row.peft:
        raise NotPredicted("adapter method not modelled: LLaMA-Adapter")
    if row.framework.startswith("torchtune"):
        raise NotPredicted("other model code, unpacked data of unknown length")
    if "moe-scattermoe" in row.framework:
        raise NotPredicted("kernel patch not modelled: ScatterMoE")
    if row.seq_len is None and "image" not in row.task:
        raise NotPredicted("sequence length not stated")
    if "4-bit" in row.optimizer:
        raise NotPredicted("optimizer not modelled: 4-bit states")


def _versions(row: Row) -> tuple[Version, Version]:
    """Return those of transformers and torch."""
    named = {
        name: tuple(int(part) for part in version.split("."))
        for name, version in re.findall(r"(transformers|torch|pytorch)[= ]=?(\d+(?:\.\d+)+)", row.versions.lower())
    }
    month = re.search(r"\d{4}-\d{2}", row.date or row.versions)
    current = [r for r in _RELEASES if month and r[0] <= month.group()] or [_RELEASES[-1]]
    _, transformers, torch_version = current[-1]
    return named.get("transformers", transformers), named.get("torch") or named.get("pytorch") or torch_version


def _precision(row: Row) -> tuple[Any, Any]:
    """Return the type of the weights, and that of mixed precision's arithmetic."""
    text = row.precision.lower()
    half = "float16" if re.search(r"\bfp16|\bfloat16", text) else "bfloat16"
    if not text:  # scripts of the QLoRA announcement: packed weights, everything else in fp32 or unpacked to 16 bits
        return ("float16" if row.quant else "float32"), None
    mixed = any(word in text for word in ("autocast", "amp", "mixed")) and "no amp" not in text
    if row.framework.startswith("transformers") and text in ("fp16", "bf16"):
        mixed = True  # the Trainer's flags
    if "fp32 weights" in text or (mixed and "loaded" not in text):
        return "float32", half
    if "fp32" in text:
        return "float32", None
    return half, half if mixed else None


def _quantization(row: Row, dtype: str) -> Quantization | None:
    text = row.quant.lower()
    if not text:
        return None
    compute = _HALF.get(dtype, torch.bfloat16)
    if "gptq" in text:
        return Quantization("gptq", group=gptq_group(row.model), compute=torch.float16)
    if "int8" in text:
        return Quantization("int8", compute=torch.float16)
    if any(word in text for word in ("nf4", "fp4", "4bit", "4-bit")):
        # bitsandbytes' Linear4bit packs its scales too unless told otherwise; fsdp_qlora makes it without saying so.
        nested = any(word in text for word in ("double_quant=true", "dq", "nested")) or "quant storage" in text
        if "cd" in text:
            compute = torch.float16 if "fp16-cd" in text else torch.bfloat16
        return Quantization("4bit", nested=nested, compute=compute)
    raise NotPredicted(f"quantization not modelled: {row.quant}")


def _upcast(
    row: Row, patched: str, quantization: Quantization | None, autocast: str | None
) -> Literal["none", "norms", "all"]:
    """Return what `prepare_model_for_kbit_training` left in fp32.

    SFTTrainer calls it for packed weights, but not where they are sharded (`is_sharded_qlora`), and casts all but the
    norms back if it trains in bf16; the plugins of fms-acceleration call their own, which casts nothing, and peft's
    leaves GPTQ models alone.
    """
    if quantization is None or quantization.kind == "gptq" or (row.n_gpus or 1) > 1:
        return "none"
    if patched == "baseline-peft-bnb":
        return "norms" if autocast == "bfloat16" else "all"
    return "all" if "SFTTrainer" in row.framework and patched == "none" else "none"


def _lora(row: Row, spec: ModelSpec) -> dict[str, Any] | None:
    if "LoRA" not in row.peft:
        return None
    if "gist" in row.peft:  # TRL's example of the time, which the announcement's script follows
        return {"r": 64, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    rank = re.search(r"r=(\d+)", row.peft)
    alpha, dropout = re.search(r"alpha=(\d+)", row.peft), re.search(r"dropout=([\d.]+)", row.peft)
    targets = re.search(r"targets=\[([^]]*)\]", row.peft)
    named = re.search(r"train\.py default: ([a-z,]+)\)", row.peft)
    if targets:
        modules = targets.group(1).replace(",", " ").split()
    elif named:
        modules = [f"{name}_proj" for name in named.group(1).split(",")]
    else:  # lit-gpt: query and value, of layers that hold query, key and value in one where the library's do
        modules = ["query_key_value"] if spec.model_type in ("falcon", "gpt_neox") else ["q_proj", "v_proj"]
    return {
        "r": int(rank.group(1)) if rank else 8,
        "lora_alpha": int(alpha.group(1)) if alpha else 16,
        "lora_dropout": float(dropout.group(1)) if dropout else 0.05,
        "target_modules": modules,
    }


def _attention(row: Row) -> str:
    text = row.attn.lower()
    if "flash" in text:
        return "flash_attention_2"
    return "sdpa" if "sdpa" in text and not text.startswith("eager") else "eager"


def _task(row: Row, spec: ModelSpec) -> Task:
    if "image" in row.task:
        return Task.IMAGE_CLASSIFICATION
    if "classification" in row.task.lower():
        return Task.SEQUENCE_CLASSIFICATION
    if spec.kind == "encoder-decoder":
        return Task.SEQ2SEQ_LM
    return Task.CAUSAL_LM


def _optimizer(row: Row, torch_version: Version) -> str:
    """Return the name of the optimizer's row in the cost model."""
    text = row.optimizer.lower()
    if "adafactor" in text:
        return "adafactor"
    if "paged" in text:
        return "paged_adamw_8bit" if "8" in text else "paged_adamw_32bit"
    if "8bit" in text or "8-bit" in text:
        return "adamw_8bit"
    if "fused" in text or row.framework.startswith("torchao"):  # its benchmarks set fused=True
        return "adamw_torch_fused"
    if "adamw_hf" in text or torch_version < (2,):
        return _LOOP
    return "adamw_torch"


def _gpu(row: Row) -> Gpu:
    name = re.sub(r"\(.*?\)|^\d+x ", "", row.gpu).strip()
    for candidate in (name, re.sub(r"\s+\d+\s*GB$", "", name)):
        try:
            return gpu_named(candidate)
        except InputError:
            continue
    raise NotPredicted(f"device not in the table: {row.gpu}")


def _technique(row: Row, software: Software) -> str:
    parts = []
    if software.quantization is not None:
        parts.append({"4bit": "4-bit", "int8": "8-bit", "gptq": "GPTQ"}[software.quantization.kind])
    parts.append("LoRA" if software.lora else "full")
    if software.linear_loss:
        parts.append("+ fused linear loss")
    elif software.fast_loss:
        parts.append("+ fast kernels")
    return " ".join(parts)


def _spread(row: Row, *, mixed: bool) -> Spread:
    """Return how a row was spread; `mixed`: whether arithmetic was in 16 bits beside weights in fp32, or would be."""
    if row.n_gpus == 1:
        return Spread(Parallelism(), mixed=False)
    offload: dict[str, Any] = {}
    if row.offload not in ("", "none"):
        if row.offload != "CPU params":
            raise NotPredicted("offloaded to the host: " + row.offload)
        offload = {"offload": "parameters"}
    sharding = next((kind for beginning, kind in _SHARDINGS if row.distributed.startswith(beginning)), None)
    stage = re.search(r"ZeRO-(\d)", row.distributed)
    if sharding is None and row.group == "deepspeed_autotune" and stage is not None:
        sharding = _STAGES[stage.group(1)]
    if sharding is None:
        raise NotPredicted("spread in a way that isn't modelled: " + (row.distributed or "not stated"))
    return Spread(
        Parallelism(world_size=row.n_gpus or 1, sharding=sharding, **offload),
        mixed=mixed,
        frozen_in_fp32=False,
        root_stays=sharding == "fsdp_full",
    )
