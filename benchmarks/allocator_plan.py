"""Which configurations `allocator_truth.py` measures and predicts: drawn by a fixed seed, and a list of compiled ones.

The drawn ones are split by family of models: rules of the cost model were mended on one half (`MEND`), the other
(`HELD_OUT`) was only looked at when that was over, BART's attention aside. Families of which errors were known
beforehand are all in the first.
"""

from __future__ import annotations

import functools
import random
from typing import Any

from autotune.value import Value
from autotune.values.config import Parallelism, Precision, Sharding, TrainConfig
from autotune.values.workload import Workload

SEED = 20261122

MEND: dict[str, tuple[str, ...]] = {
    "bert": ("bert-base-uncased", "bert-large-uncased"),
    "gpt2": ("gpt2", "gpt2-medium", "gpt2-xl"),
    "t5": ("t5-small", "t5-base", "t5-3b"),
    "llama-2": ("meta-llama/Llama-2-7b-hf", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    "llama-3": ("meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.2-1B"),
    "qwen2": ("Qwen/Qwen1.5-0.5B", "Qwen/Qwen2-1.5B"),
    "opt": ("facebook/opt-125m", "facebook/opt-1.3b"),
    "pythia": ("EleutherAI/pythia-160m", "EleutherAI/pythia-1.4b"),
}

HELD_OUT: dict[str, tuple[str, ...]] = {
    "roberta": ("FacebookAI/roberta-base", "FacebookAI/xlm-roberta-large"),
    "bart": ("facebook/bart-base", "facebook/bart-large"),
    "mistral": ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.3"),
    "qwen3": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"),
    "gemma2": ("google/gemma-2-2b",),
    "gemma3": ("google/gemma-3-270m", "google/gemma-3-1b-pt"),
    "phi": ("microsoft/phi-1_5", "microsoft/Phi-3-mini-4k-instruct"),
    "modernbert": ("answerdotai/ModernBERT-base", "answerdotai/ModernBERT-large"),
}

# Convolutions; looked at when the rules were made.
FURTHER: dict[str, tuple[str, ...]] = {
    "vit": ("google/vit-base-patch16-224", "google/vit-large-patch16-224"),
    "whisper": ("openai/whisper-tiny", "openai/whisper-small"),
}

DRAWN = {"mend": MEND, "held-out": HELD_OUT, "further": FURTHER}

LORA = {"adapter": {"kind": "lora", "rank": 16}}
GRAPHS = {"torch_compile_mode": "reduce-overhead"}

# Family, model, precision, checkpointing, micro-batch, length and how else it is trained, of what inductor compiles.
COMPILED: tuple[tuple[Any, ...], ...] = (
    ("bert", "bert-base-uncased", "bf16", "none", 16, 512),
    ("gpt2", "gpt2", "bf16", "none", 8, 1024),
    ("t5", "t5-small", "bf16", "none", 16, 512),
    ("llama-3", "meta-llama/Llama-3.2-1B", "bf16", "none", 4, 512),
    ("bert", "bert-base-uncased", "fp32", "none", 16, 512),
    ("gpt2", "gpt2", "fp32", "none", 8, 1024),
    ("t5", "t5-small", "fp32", "none", 16, 512),
    ("gpt2", "gpt2", "bf16", "full", 8, 1024),
    ("bert", "bert-base-uncased", "bf16", "full", 16, 512),
    ("t5", "t5-small", "bf16", "full", 16, 512),
    ("llama-3", "meta-llama/Llama-3.2-1B", "bf16", "full", 4, 512),
    ("gpt2", "gpt2", "bf16", "none", 1, 256),
    ("bert", "bert-large-uncased", "fp32", "none", 8, 512),
    ("llama-3", "meta-llama/Llama-3.2-1B", "fp32", "none", 4, 512),
    ("gpt2", "gpt2-medium", "bf16", "none", 16, 1024),
    ("opt", "facebook/opt-125m", "bf16", "none", 8, 1024),
    ("qwen2", "Qwen/Qwen1.5-0.5B", "bf16", "none", 4, 512),
    ("pythia", "EleutherAI/pythia-160m", "bf16", "none", 8, 1024),
    ("gpt2", "gpt2", "bf16", "none", 8, 1024, LORA),
    ("gpt2", "gpt2", "bf16", "none", 8, 1024, GRAPHS),
    ("llama-3", "meta-llama/Llama-3.2-1B", "bf16", "none", 4, 512, LORA),
    ("qwen2", "Qwen/Qwen2-1.5B", "bf16", "full", 4, 512),
    ("bert", "bert-base-uncased", "bf16", "full", 16, 512, GRAPHS),
    ("opt", "facebook/opt-125m", "fp32", "none", 4, 512),
    ("opt", "facebook/opt-125m", "bf16", "full", 8, 1024),
    ("pythia", "EleutherAI/pythia-160m", "fp32", "full", 8, 512),
    ("qwen2", "Qwen/Qwen1.5-0.5B", "fp32", "none", 4, 1024),
    ("bert", "bert-base-uncased", "bf16", "every-2nd", 16, 256),
    ("qwen2", "Qwen/Qwen1.5-0.5B", "bf16", "full", 4, 1024, LORA),
    ("llama-2", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "pure_bf16", "none", 2, 1024),
    ("opt", "facebook/opt-1.3b", "bf16", "none", 2, 512),
    ("gpt2", "gpt2", "fp32", "every-2nd", 8, 512),
    # Held out
    ("roberta", "FacebookAI/roberta-base", "bf16", "none", 16, 512),
    ("qwen3", "Qwen/Qwen3-0.6B", "bf16", "none", 4, 512),
    ("gemma3", "google/gemma-3-270m", "bf16", "none", 4, 512),
    ("vit", "google/vit-base-patch16-224", "bf16", "none", 32, 3000),
    ("modernbert", "answerdotai/ModernBERT-base", "bf16", "none", 8, 512),
    ("phi", "microsoft/phi-1_5", "bf16", "none", 2, 512),
    ("bart", "facebook/bart-base", "bf16", "none", 8, 512),
    ("roberta", "FacebookAI/roberta-base", "fp32", "none", 8, 256),
    ("qwen3", "Qwen/Qwen3-0.6B", "bf16", "full", 4, 1024),
    ("gemma3", "google/gemma-3-270m", "fp32", "none", 4, 1024),
    ("vit", "google/vit-base-patch16-224", "fp32", "none", 16, 3000),
    ("modernbert", "answerdotai/ModernBERT-base", "fp32", "full", 8, 512),
    ("roberta", "FacebookAI/roberta-base", "bf16", "full", 16, 512),
    ("roberta", "FacebookAI/roberta-base", "bf16", "none", 16, 256, LORA),
    ("roberta", "FacebookAI/roberta-base", "bf16", "none", 8, 512, GRAPHS),
    ("qwen3", "Qwen/Qwen3-0.6B", "bf16", "none", 4, 512, LORA),
    ("qwen3", "Qwen/Qwen3-0.6B", "fp32", "none", 2, 512),
    ("gemma3", "google/gemma-3-270m", "bf16", "full", 8, 512),
    ("gemma3", "google/gemma-3-270m", "bf16", "none", 4, 512, LORA),
    ("vit", "google/vit-base-patch16-224", "bf16", "full", 32, 3000),
    ("vit", "google/vit-base-patch16-224", "bf16", "none", 16, 3000, GRAPHS),
    ("vit", "google/vit-large-patch16-224", "bf16", "every-2nd", 16, 3000),
    ("phi", "microsoft/phi-1_5", "bf16", "full", 2, 1024),
    ("phi", "microsoft/phi-1_5", "pure_bf16", "none", 2, 512, LORA),
    ("bart", "facebook/bart-base", "fp32", "full", 8, 512),
    ("bart", "facebook/bart-base", "bf16", "none", 4, 1024, LORA),
    ("roberta", "FacebookAI/xlm-roberta-large", "bf16", "none", 8, 512),
    ("modernbert", "answerdotai/ModernBERT-base", "bf16", "full", 8, 1024, GRAPHS),
    ("qwen3", "Qwen/Qwen3-1.7B", "bf16", "every-2nd", 2, 512),
    ("gemma2", "google/gemma-2-2b", "bf16", "none", 1, 512),
)  # fmt: skip

# FSDP2 in bf16: family, model, sharding, devices, of which so many share a sample's tokens, micro-batch, micro-batches
# of a step, tokens, checkpointing. Rules were mended on the first seven, and one more on the last but one.
CHUNKS, LIGER = {"chunked_loss": True}, {"use_liger_kernel": True}
SHARDED: tuple[tuple[Any, ...], ...] = (
    ("llama-3", "meta-llama/Llama-3.2-1B", "fsdp_full", 2, 1, 1, 2, 32768, "full", CHUNKS),
    ("llama-3", "meta-llama/Llama-3.2-1B", "fsdp_full", 2, 2, 1, 2, 8192, "none", CHUNKS),
    ("llama-3", "meta-llama/Llama-3.2-1B", "fsdp_full", 4, 4, 1, 2, 131072, "full", CHUNKS),
    ("qwen3", "Qwen/Qwen3-0.6B", "fsdp_full", 4, 2, 1, 2, 8192, "none"),
    ("qwen3", "Qwen/Qwen3-0.6B", "fsdp_grad_op", 4, 4, 1, 2, 16384, "full", LIGER),
    ("pythia", "EleutherAI/pythia-410m", "fsdp_full", 2, 1, 4, 2, 2048, "full", CHUNKS),
    ("llama-2", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "fsdp_full", 4, 1, 4, 1, 4096, "full", LIGER),
    ("qwen3", "Qwen/Qwen3-1.7B", "fsdp_full", 2, 2, 1, 2, 16384, "full", CHUNKS),
    ("qwen3", "Qwen/Qwen3-1.7B", "fsdp_full", 2, 2, 1, 1, 65536, "full", LIGER),
    ("qwen2", "Qwen/Qwen2-1.5B", "fsdp_grad_op", 2, 2, 1, 2, 16384, "full"),
    ("qwen2", "Qwen/Qwen2-1.5B", "fsdp_full", 2, 1, 2, 2, 4096, "full", CHUNKS),
    ("phi", "microsoft/phi-1_5", "fsdp_full", 2, 1, 2, 1, 2048, "none", CHUNKS),
    ("phi", "microsoft/phi-1_5", "fsdp_full", 2, 2, 2, 2, 2048, "full"),
    ("opt", "facebook/opt-1.3b", "fsdp_full", 4, 2, 2, 2, 2048, "none"),
    ("opt", "facebook/opt-1.3b", "fsdp_full", 2, 1, 2, 2, 2048, "full", CHUNKS),
    ("llama-2", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "fsdp_full", 4, 4, 4, 2, 2048, "full", LORA),
    ("llama-2", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "fsdp_grad_op", 4, 1, 2, 1, 2048, "none", CHUNKS),
    ("qwen3", "Qwen/Qwen3-0.6B", "fsdp_full", 4, 4, 1, 2, 131072, "full", LIGER),
)  # fmt: skip

PARTS = (*DRAWN, "compiled", "sharded")

# Compute capability to the stand-in's multiprocessors and name. On 9.0 the stand-in has cuDNN's attention off.
DEVICES = {
    "7.5": (40, "Tesla T4"),
    "8.0": (108, "NVIDIA A100-SXM4-80GB"),
    "8.6": (84, "NVIDIA A40"),
    "9.0": (132, "NVIDIA H100 80GB HBM3"),
}

OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_32bit",
    "rmsprop",
)  # fmt: skip

_DRAWS = 16  # of a family on one device, of which rules refuse some
_SOAKS = 1
_SPREAD: tuple[Sharding, ...] = ("none", "fsdp_full")  # over two devices
_FURTHER_DRAWS = 10
_FRAMES = 3000  # of a sample of Whisper


class Case(Value):
    number: int
    part: str
    family: str
    model: str
    capability: str
    length: int
    accumulation: int
    soak: bool = False
    config: TrainConfig

    @property
    def key(self) -> str:
        """What tells it from every other one, whatever else the plan comes to hold."""
        return self.digest(leave_out=frozenset({"number"}))


def plan() -> list[Case]:
    """Return all configurations, drawn for each family by itself."""
    cases: list[Case] = []
    for part, families in DRAWN.items():
        for family, models in families.items():
            chance = random.Random(f"{SEED}-{family}")
            given = {"part": part, "family": family}
            for i in range(_DRAWS):
                model = models[i % len(models)]
                cases.append(_drawn(chance, number=len(cases), model=model, soak=i < _SOAKS, **given))
            if part == "further":
                cases[-_DRAWS:] = [_of_convolutions(chance, case) for case in cases[-_DRAWS:]][:_FURTHER_DRAWS]
                continue
            cases += [
                _spread(chance, way, number=len(cases) + i, model=models[0], **given) for i, way in enumerate(_SPREAD)
            ]
    for family, model, precision, checkpointing, micro_batch, length, *further in COMPILED:
        knobs = {"precision": precision, "checkpointing": checkpointing, "torch_compile_backend": "inductor"}
        knobs |= {"per_device_train_batch_size": micro_batch, **(further[0] if further else {})}
        cases.append(_listed("compiled", len(cases), family, model, length, 1, knobs))
    for family, model, sharding, devices, shared, micro_batch, accumulation, length, checkpointing, *further in SHARDED:
        spread = {"world_size": devices, "sharding": sharding, "sequence_parallel": shared}
        knobs = {"precision": "bf16", "checkpointing": checkpointing, "parallelism": spread}
        knobs |= {"per_device_train_batch_size": micro_batch, **(further[0] if further else {})}
        cases.append(_listed("sharded", len(cases), family, model, length, accumulation, knobs))
    return cases


def _listed(
    part: str, number: int, family: str, model: str, length: int, accumulation: int, knobs: dict[str, Any]
) -> Case:
    config = TrainConfig.model_validate({"attn_implementation": "sdpa", **knobs})
    given = {"part": part, "number": number, "family": family, "model": model, "capability": "8.0"}
    return Case(**given, length=length, accumulation=accumulation, config=config)


def _drawn(chance: random.Random, *, family: str, model: str, **given: Any) -> Case:
    capability = chance.choice(list(DEVICES))
    halves = ["bf16", "pure_bf16"] if capability != "7.5" else []
    precision = chance.choice(["fp32", *(["fp16"] if family != "t5" else []), *halves])
    checkpointing = chance.choice(["none", "none", "full", "full", "every-2nd", "every-4th", "offload", "full"])
    kind = chance.choice(["full", "full", "full", "lora", "qlora"])
    optim = chance.choice(OPTIMIZERS)
    attention = chance.choice(["sdpa", "sdpa", "eager"])
    length = chance.choice([128, 256, 512, 512, 1000, 1024] + ([2048] if family not in _SHORT else []))
    length = min(length, _SHORT.get(family, length))
    tokens = 2 ** chance.choice([11, 12, 13]) // (2 if _is_large(model) else 1)
    return Case(
        **given,
        family=family,
        model=model,
        capability=capability,
        length=length,
        accumulation=chance.choice([1, 1, 2]),
        config=TrainConfig.model_validate(
            {
                "per_device_train_batch_size": max(1, tokens // length - chance.choice([0, 0, 1])),
                "precision": precision,
                "checkpointing": checkpointing,
                "optim": optim,
                "attn_implementation": attention,
                "adapter": None if kind == "full" else {"kind": "lora", "rank": chance.choice([8, 64])},
                "quantization": chance.choice(["nf4", "nf4-double", "int8"]) if kind == "qlora" else None,
            }
        ),
    )


def _of_convolutions(chance: random.Random, case: Case) -> Case:
    """Return a case of images or sound, whose samples have one length."""
    config = case.config.model_copy(update={"per_device_train_batch_size": chance.choice([4, 8, 16, 31])})
    return case.model_copy(update={"config": config, "length": _FRAMES, "soak": False})


def _spread(chance: random.Random, sharding: Sharding, **given: Any) -> Case:
    case = _drawn(chance, **given)
    changes = {
        "parallelism": Parallelism(world_size=2, sharding=sharding),
        "adapter": None,
        "quantization": None,
        "optim": "adamw_torch_fused",
        "checkpointing": chance.choice(["none", "full"]),
        "precision": Precision.BF16,
    }
    return case.model_copy(update={"config": case.config.model_copy(update=changes), "capability": "8.0"})


_SHORT = {"bert": 512, "roberta": 512, "gpt2": 1024, "bart": 1024, "t5": 512}


def _is_large(model: str) -> bool:
    return any(size in model for size in ("7b", "7B", "8B", "3b", "xl", "mini-4k"))


@functools.cache
def _known(model: str) -> tuple[Any, Any, Any]:
    from autotune.training.build import describe
    from autotune.training.resolve import default_task, resolve

    spec = resolve(model)
    task = default_task(spec)
    return spec, task, describe(spec, task)


def workload_of(case: Case) -> tuple[Workload, Any]:
    spec, task, facts = _known(case.model)
    ranks = case.config.parallelism.data_parallel
    workload = Workload(
        model=spec,
        task=task,
        sequence_length=case.length,
        target_length=128 if task.takes_audio else case.length,
        global_batch_size=case.config.per_device_train_batch_size * case.accumulation * ranks,
    )
    return workload, facts
