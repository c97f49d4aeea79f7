"""Models: a specification to build one from, and the facts of its classes that rules and predictions need.

`autotune.training.resolve` makes a :class:`ModelSpec` of a name, `autotune.training.facts` reads :class:`ModelFacts`.
"""

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Literal

from autotune.value import Value
from autotune.values.hardware import installed_versions
from autotune.values.techniques import HUB_EXPERTS


class Task(StrEnum):
    """The task, which decides the model's head, the inputs and the loss."""

    CAUSAL_LM = "causal-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    MASKED_LM = "masked-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    IMAGE_CLASSIFICATION = "image-classification"
    SPEECH_CTC = "speech-ctc"
    SPEECH_SEQ2SEQ = "speech-seq2seq"
    AUDIO_CLASSIFICATION = "audio-classification"
    IMAGE_TEXT_TO_TEXT = "image-text-to-text"
    OWN = "own"  # the user's training loop, whose task is unknown

    @classmethod
    def heads(cls) -> tuple["Task", ...]:
        return tuple(task for task in cls if task is not cls.OWN)

    @property
    def takes_text(self) -> bool:
        return self not in (Task.IMAGE_CLASSIFICATION, Task.OWN) and not self.takes_audio

    @property
    def takes_audio(self) -> bool:
        return self in (Task.SPEECH_CTC, Task.SPEECH_SEQ2SEQ, Task.AUDIO_CLASSIFICATION)

    @property
    def has_targets(self) -> bool:
        """Whether a decoder predicts target token ids besides the inputs."""
        return self in (Task.SEQ2SEQ_LM, Task.SPEECH_SEQ2SEQ)


Kind = Literal["decoder", "encoder", "encoder-decoder", "vision", "vision-language", "speech", "speech-to-text", "own"]


class ModelSpec(Value):
    """All that another process needs to build a model with random weights."""

    reference: str  # the model as the user named it
    name: str  # canonical name: the full id on the hub, or the directory's name
    source: Literal["catalogue", "directory", "hub", "own"]  # own: the user's code makes it
    model_type: str  # transformers' model_type, the key of its config class
    kind: Kind
    config: dict[str, Any]  # keyword arguments of the config class
    path: str | None = None  # local directory that holds config.json, if there is one
    revision: str | None = None
    trust_remote_code: bool = False
    freeze_vision: bool = False  # whether the weights of the vision part stay as they are
    # Modules and parameters that the user's code doesn't train; * stands for the number of every layer.
    frozen: tuple[str, ...] = ()

    @property
    def hub_kernels(self) -> tuple[str, ...]:
        """Repositories of kernels on the hub that the config names, which transformers fetches and runs."""
        return tuple(dict.fromkeys(_kernels_in(self.config)))

    @property
    def missing_kernels(self) -> dict[str, str]:
        """Kernels of flash attention that the config names, with their packages, which aren't installed."""
        told, installed = json.dumps(self.config), installed_versions()
        return {name: p for name, p in FLASH_PACKAGES.items() if f'"{name}"' in told and p not in installed}


def _kernels_in(value: Any, *, is_name: bool = False) -> Iterator[str]:
    """Yield the texts in a config that name a repository; `is_name`: whether texts name implementations here."""
    if isinstance(value, dict):
        for key in sorted(value):
            # The field is one name for the whole model, or names by its parts.
            names = is_name or bool(re.search("(attn|experts)_implementation", key))
            yield from _kernels_in(value[key], is_name=names)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _kernels_in(inner, is_name=is_name)
    elif is_name and isinstance(value, str) and ("/" in value or value in HUB_EXPERTS):
        yield value


# Packages of the kernels (https://github.com/Dao-AILab/flash-attention).
FLASH_PACKAGES = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}

# Types whose layers are transformers' Conv1D in place of linear ones.
CONV1D_TYPES = ("gpt2", "imagegpt", "openai-gpt")

# Types with a head that can't be trained as it is here, and why (5.24).
UNTRAINED = {
    **dict.fromkeys(("audioflamingo3", "glmasr", "musicflamingo", "nemo_speechlm", "qwen2_audio"), "needs recordings"),
    **dict.fromkeys(("git", "shieldgemma2"), "needs an image beside each text"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "needs keys and values of another model"),
    "pp_lcnet": "returns no loss",
    "siglip2": "needs images cut into patches",
}

# Size of the vocabulary of types whose config doesn't tell: CANINE's ids are Unicode's code points.
VOCABULARIES = {"canine": 0x110000}

# Image models that cast images to the bf16 of their weights (5.24); others hand fp32 to a convolution, which fails.
CASTING_IMAGES = (
    "clip", "data2vec-vision", "deit", "dinov2", "dinov2_with_registers", "ijepa", "imagegpt", "metaclip_2",
    "siglip", "timm_wrapper", "vit", "vit_msn",
)  # fmt: skip

# Implementations of experts in transformers 5 (`ExpertsInterface` in integrations/moe.py).
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")


class ModelFacts(Value):
    """Properties of a model for one task, read from its classes and its instance on the meta device."""

    task: Task
    parameters: int  # number of parameters, tied ones counted once
    frozen_parameters: int = 0  # number of those that aren't trained
    attn_implementations: tuple[str, ...]  # kernels that the class supports, the default first; empty: no attention
    experts: int = 0  # number of experts of a layer; 0: none
    experts_implementations: tuple[str, ...] = ()  # implementations that the class supports, the default first
    experts_per_token: int | None = None  # experts per token, if configurable
    expert_capacity: int | None = None  # tokens per expert, if limited
    liger: bool = False  # whether the installed liger-kernel supports the model type
    supports_checkpointing: bool
    layers: int | None = None  # layers that can be checkpointed one by one; None: unknown
    batch_coupled: str | None = None  # why a split into micro-batches changes results (batch norm, router loss)
    split_changes: str | None = None  # own loop: how a split into micro-batches changed the gradient; None: it didn't
    has_dropout: bool
    shifts_labels: bool = True  # whether a causal model's loss leaves out the first label of each row
    chunks_loss: bool = False  # whether head and loss can be worked out in chunks
    packs: bool = False  # whether attention stays within the samples of a packed row
    max_sequence_length: int | None = None  # positions of the model; None: unlimited
    max_target_length: int | None = None  # positions of the decoder; None: `max_sequence_length`
    linear_modules: tuple[str, ...] = ()  # last names of the linear layers, for adapters
    biases: int | None = None  # number of biases below the head; None: not counted
    expert_parameters: tuple[str, ...] = ()  # last names of the fused weights of experts
    takes_prefix: bool | None = None  # whether peft's prefix tuning fits the head
    not_fsdp: str | None = None  # why FSDP2 can't shard the model; None: it can, or not examined
    has_self_attn: bool = False  # whether attention is a module of this name, as context parallel takes it
    counts_keys: bool = True  # whether its config has a number of key heads, which DeepSpeed's Ulysses reads
    tensor_parallel_heads: int | None = None  # heads that tensor parallelism can divide; None: its class has no plan
    architecture: str | None = None  # digest of class and config, independent of the name; None: not computed
