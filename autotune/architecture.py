"""What is known of a model: where its figures come from, and what its classes can do.

Values only. `autotune.models` resolves a name to a :class:`ModelSpec` and describes its classes as
:class:`ModelFacts`; everything else reads these.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from autotune.values import Value


class Task(StrEnum):
    """The head that is trained, which decides the inputs and the loss."""

    CAUSAL_LM = "causal-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    MASKED_LM = "masked-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    IMAGE_CLASSIFICATION = "image-classification"

    @property
    def takes_text(self) -> bool:
        """Whether the inputs are token ids (otherwise pixel values)."""
        return self is not Task.IMAGE_CLASSIFICATION


Kind = Literal["decoder", "encoder", "encoder-decoder", "vision"]


class ModelSpec(Value):
    """A model by name: enough to build it with random weights in another process."""

    reference: str = Field(description="what the user wrote")
    name: str = Field(description="canonical name: the full id, or the directory's name")
    source: Literal["catalogue", "directory", "hub"]
    model_type: str = Field(description="transformers' model_type, the key of its config class")
    kind: Kind
    config: dict[str, Any] = Field(description="keyword arguments of the config class")
    path: str | None = Field(default=None, description="local directory that holds config.json, if there is one")
    revision: str | None = None
    trust_remote_code: bool = False


class ModelFacts(Value):
    """What the classes of a model offer for one task, read off the model built on the meta device."""

    task: Task
    parameters: int = Field(description="number of parameters, tied ones counted once")
    attn_implementations: tuple[str, ...] = Field(
        description="kernels that the class says it supports, the library's default first; empty: no attention"
    )
    supports_checkpointing: bool
    batch_coupled: str | None = Field(
        default=None,
        description="why the micro-batch split changes the numbers (batch norm, router loss), or None",
    )
    has_dropout: bool
    max_sequence_length: int | None = Field(default=None, description="positions the model has, None: unlimited")
    vocab_size: int | None = None
    linear_modules: tuple[str, ...] = Field(default=(), description="last names of the linear layers, for adapters")
