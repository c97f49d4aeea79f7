"""Kinds of adapters (parameter-efficient fine-tuning), each with its fields and a few facts.

peft implements all but BitFit; `training.adapters` maps them to peft's arguments.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, PositiveInt

from autotune.value import Value

Targets = Literal["all-linear", "attention", "all-linear+experts"]


# 2^16 is above the width of any published layer's input.
Rank = Annotated[PositiveInt, Field(le=1 << 16, description="rank of the adapter's factors")]
Alpha = Annotated[PositiveInt, Field(le=1 << 16, description="the adapter's output is scaled by alpha / rank")]
Dropout = Annotated[float, Field(ge=0.0, lt=1.0, description="dropout of the adapter's input")]


class Adapter(Value):
    """Base class of the kinds of adapters."""

    # Whether peft can train it on a base model that bitsandbytes has quantized.
    on_quantized: ClassVar[bool] = False
    # Whether it can adapt the fused weights of experts (peft's target_parameters, which only LoRA has).
    on_experts: ClassVar[bool] = False

    kind: str

    @property
    def prompt_length(self) -> int:
        """Number of virtual tokens; they take up positions of the model."""
        return int(getattr(self, "virtual_tokens", 0))

    @property
    def shown(self) -> str:
        """The adapter in words."""
        if self.prompt_length:
            return f"{self.kind} of {self.prompt_length} virtual tokens"
        return f"{self.kind} rank {self.rank} on {self.target_modules}" if isinstance(self, _Ranked) else self.kind


class _Ranked(Adapter):
    rank: Rank = 16
    target_modules: Targets = "all-linear"


class _LowRank(_Ranked):
    alpha: Alpha = 32


class _LoraFamily(_LowRank):  # made by peft's LoraConfig
    on_quantized: ClassVar[bool] = True

    dropout: Dropout = 0.0


class LoraAdapter(_LoraFamily):
    """Low-rank adapters beside frozen weights (arXiv:2106.09685)."""

    on_experts: ClassVar[bool] = True

    kind: Literal["lora"] = "lora"


class RsloraAdapter(_LoraFamily):
    """LoRA scaled by alpha / sqrt(rank), which stays stable at high ranks (arXiv:2312.03732)."""

    on_experts: ClassVar[bool] = True

    kind: Literal["rslora"] = "rslora"


class DoraAdapter(_LoraFamily):
    """LoRA of the direction of each weight, and a trained magnitude (arXiv:2402.09353)."""

    kind: Literal["dora"] = "dora"


class VeraAdapter(_Ranked):
    """Trained vectors that scale frozen random factors, which all layers share (arXiv:2310.11454)."""

    on_quantized: ClassVar[bool] = True

    kind: Literal["vera"] = "vera"
    rank: Rank = 256
    dropout: Dropout = 0.0


class Ia3Adapter(Adapter):
    """Trained vectors that scale keys, values and the input of the last feed-forward layer (arXiv:2205.05638)."""

    on_quantized: ClassVar[bool] = True

    kind: Literal["ia3"] = "ia3"


class LohaAdapter(_LowRank):
    """Products of two low-rank factors, element by element (arXiv:2108.06098)."""

    kind: Literal["loha"] = "loha"
    rank: Rank = 8
    alpha: Alpha = 8


class LokrAdapter(_LowRank):
    """Kronecker products of low-rank factors (arXiv:2212.10650)."""

    kind: Literal["lokr"] = "lokr"
    rank: Rank = 8
    alpha: Alpha = 8


class _Prompt(Adapter):
    on_quantized: ClassVar[bool] = True

    virtual_tokens: PositiveInt = Field(default=20, description="learned tokens before the real ones")


class PrefixAdapter(_Prompt):
    """Trained keys and values before those of every layer (arXiv:2101.00190)."""

    kind: Literal["prefix"] = "prefix"


class PromptAdapter(_Prompt):
    """Trained embeddings before those of the input (arXiv:2104.08691)."""

    kind: Literal["prompt"] = "prompt"


class PTuningAdapter(_Prompt):
    """Embeddings before those of the input, computed by a small trained network (arXiv:2103.10385)."""

    kind: Literal["p-tuning"] = "p-tuning"
    encoder_hidden_size: PositiveInt = Field(
        default=128, description="hidden size of the network that computes the virtual tokens"
    )


class BitfitAdapter(Adapter):
    """Trains the biases and the head of a classifier, without new weights (arXiv:2106.10199)."""

    kind: Literal["bitfit"] = "bitfit"


AnyAdapter = Annotated[
    LoraAdapter
    | RsloraAdapter
    | DoraAdapter
    | VeraAdapter
    | Ia3Adapter
    | LohaAdapter
    | LokrAdapter
    | PrefixAdapter
    | PromptAdapter
    | PTuningAdapter
    | BitfitAdapter,
    Field(discriminator="kind"),
]


class OwnAdapter(Adapter):
    """The adapter that a user's code puts on its model itself."""

    kind: Literal["own"] = "own"
    arguments: str = Field(description="of peft's config class where they aren't its defaults, and peft_type, as JSON")


# Every kind by its name, in the order of the union.
ADAPTERS: dict[str, type[Adapter]] = {
    str(kind.model_fields["kind"].default): kind for kind in get_args(get_args(AnyAdapter)[0])
}


def kinds_with(field: str) -> tuple[str, ...]:
    """Return the kinds of adapters that have a field of that name."""
    return tuple(name for name, kind in ADAPTERS.items() if field in kind.model_fields)


def is_new_weight(name: str) -> bool:
    """Return whether a parameter of that name belongs to an adapter and not to the model."""
    # Of peft's tuners, its prompts, and its copies of classification heads.
    parts = ("lora_", "vera_lambda_", "ia3_", "hada_", "lokr_", "prompt_encoder.", "modules_to_save.")
    return any(part in name for part in parts)
