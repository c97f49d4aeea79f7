"""What is known of a model: where its figures come from, and what its classes can do.

Values only. `autotune.training.build` resolves a name to a :class:`ModelSpec` and describes its classes as
:class:`ModelFacts`; everything else reads these.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Literal

from pydantic import Field

from autotune.value import Value


class Task(StrEnum):
    """The head that is trained, which decides the inputs and the loss."""

    CAUSAL_LM = "causal-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    MASKED_LM = "masked-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    IMAGE_CLASSIFICATION = "image-classification"
    SPEECH_CTC = "speech-ctc"
    SPEECH_SEQ2SEQ = "speech-seq2seq"
    AUDIO_CLASSIFICATION = "audio-classification"
    OWN = "own"  # a training of the user's own, of which nothing is known

    @classmethod
    def heads(cls) -> tuple[Task, ...]:
        """Return the tasks that a model can have a head for."""
        return tuple(task for task in cls if task is not cls.OWN)

    @property
    def takes_text(self) -> bool:
        """Whether the inputs are token ids (otherwise pixel values or sound)."""
        return self not in (Task.IMAGE_CLASSIFICATION, Task.OWN) and not self.takes_audio

    @property
    def takes_audio(self) -> bool:
        """Whether the inputs are waveforms or spectrograms."""
        return self in (Task.SPEECH_CTC, Task.SPEECH_SEQ2SEQ, Task.AUDIO_CLASSIFICATION)

    @property
    def has_targets(self) -> bool:
        """Whether a decoder has token ids of its own to predict."""
        return self in (Task.SEQ2SEQ_LM, Task.SPEECH_SEQ2SEQ)


Kind = Literal["decoder", "encoder", "encoder-decoder", "vision", "speech", "speech-to-text", "own"]


class ModelSpec(Value):
    """A model by name: enough to build it with random weights in another process."""

    reference: str = Field(description="what the user wrote")
    name: str = Field(description="canonical name: the full id, or the directory's name")
    source: Literal["catalogue", "directory", "hub", "own"] = Field(description="own: the user's code makes it")
    model_type: str = Field(description="transformers' model_type, the key of its config class")
    kind: Kind
    config: dict[str, Any] = Field(description="keyword arguments of the config class")
    path: str | None = Field(default=None, description="local directory that holds config.json, if there is one")
    revision: str | None = None
    trust_remote_code: bool = False


# What brings each kernel (https://github.com/Dao-AILab/flash-attention): the third is a distribution of its own.
FLASH_PACKAGES = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}

# Ways of running experts that transformers 5 can switch its models between (`ExpertsInterface` in integrations/moe.py);
# the last two are kernels from the hub.
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager", "deepgemm", "sonicmoe")
HUB_EXPERTS = frozenset({"deepgemm", "sonicmoe"})


class ModelFacts(Value):
    """What the classes of a model offer for one task, read off the model built on the meta device."""

    retired: ClassVar[frozenset[str]] = frozenset({"probes", "not_probed"})

    task: Task
    parameters: int = Field(description="number of parameters, tied ones counted once")
    attn_implementations: tuple[str, ...] = Field(
        description="kernels that the class says it supports, the library's default first; empty: no attention"
    )
    experts: int = Field(default=0, description="experts of a layer, 0: none")
    experts_implementations: tuple[str, ...] = Field(
        default=(), description="ways of running experts that its class can be switched between, the default first"
    )
    experts_per_token: int | None = Field(default=None, description="experts that a token goes to, where it can be set")
    expert_capacity: int | None = Field(default=None, description="tokens that an expert takes, where that is limited")
    liger: bool = Field(default=False, description="whether the installed liger-kernel has kernels for its type")
    supports_checkpointing: bool
    layers: int | None = Field(default=None, description="that can be checkpointed one by one, None: unknown")
    batch_coupled: str | None = Field(
        default=None,
        description="why the micro-batch split changes the numbers (batch norm, router loss), or None",
    )
    split_changes: str | None = Field(
        default=None,
        description="of the user's own training: how its gradient was seen to change with the split; None: it wasn't",
    )
    has_dropout: bool
    packs: bool = Field(default=False, description="attention stays within the samples of a packed row")
    max_sequence_length: int | None = Field(default=None, description="positions the model has, None: unlimited")
    max_target_length: int | None = Field(default=None, description="of a decoder that has its own, None: as above")
    vocab_size: int | None = None
    linear_modules: tuple[str, ...] = Field(default=(), description="last names of the linear layers, for adapters")
    biases: int | None = Field(default=None, description="number of biases below the head, None: not looked at")
    expert_parameters: tuple[str, ...] = Field(default=(), description="last names of the fused weights of experts")
    takes_prefix: bool | None = Field(default=None, description="whether its head takes keys and values from outside")
    not_fsdp: str | None = Field(default=None, description="why FSDP2 can't shard it; None: it can, or not looked at")
    tensor_parallel_heads: int | None = Field(
        default=None, description="attention heads that tensor parallel can deal out; None: its class has no plan"
    )
    architecture: str | None = Field(
        default=None, description="digest of class and config, whatever the model is called; None: not looked at"
    )
