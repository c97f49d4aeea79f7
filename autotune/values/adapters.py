"""Adapters by name: what is trained in place of all weights, each kind with the fields it has.

Values, and a few facts of each kind that rules and the cost model read. peft's arguments for them are in
`training.adapters`; all but BitFit are peft's.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, PositiveInt

from autotune.value import Value

Targets = Literal["all-linear", "attention", "all-linear+experts"]


class Adapter(Value):
    """What every kind has: facts, and its name in words."""

    # Whether peft can put it on layers whose weights bitsandbytes has packed, or beside them.
    on_quantized: ClassVar[bool] = False
    # Whether it trains the fused weights of experts (peft's target_parameters, which its LoRA alone has).
    on_experts: ClassVar[bool] = False

    kind: str

    @property
    def prompt_length(self) -> int:
        """Virtual tokens that it puts before the real ones, which take positions as they do."""
        return 0

    @property
    def shown(self) -> str:
        """The adapter in words."""
        return self.kind


class _LowRank(Adapter):
    """Factors of low rank beside frozen weights."""

    rank: PositiveInt = Field(default=16, description="of the adapter's factors")
    alpha: PositiveInt = Field(default=32, description="the adapter's output is scaled by alpha / rank")
    target_modules: Targets = "all-linear"

    @property
    def shown(self) -> str:
        """The adapter in words."""
        return f"{self.kind} rank {self.rank} on {self.target_modules}"


class LoraAdapter(_LowRank):
    """Low-rank adapters beside frozen weights (arXiv:2106.09685)."""

    on_quantized: ClassVar[bool] = True
    on_experts: ClassVar[bool] = True

    kind: Literal["lora"] = "lora"
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="of the adapter's input")


class RsloraAdapter(_LowRank):
    """LoRA scaled by alpha / sqrt(rank), which holds for high ranks too (arXiv:2312.03732)."""

    on_quantized: ClassVar[bool] = True
    on_experts: ClassVar[bool] = True

    kind: Literal["rslora"] = "rslora"
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="of the adapter's input")


class DoraAdapter(_LowRank):
    """LoRA for the direction of each weight, with a magnitude of its own (arXiv:2402.09353)."""

    on_quantized: ClassVar[bool] = True

    kind: Literal["dora"] = "dora"
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="of the adapter's input")


class VeraAdapter(Adapter):
    """Vectors that scale random factors which all layers share and nobody trains (arXiv:2310.11454)."""

    on_quantized: ClassVar[bool] = True

    kind: Literal["vera"] = "vera"
    rank: PositiveInt = Field(default=256, description="of the adapter's factors")
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="of the adapter's input")
    target_modules: Targets = "all-linear"

    @property
    def shown(self) -> str:
        """The adapter in words."""
        return f"{self.kind} rank {self.rank} on {self.target_modules}"


class Ia3Adapter(Adapter):
    """Vectors that scale keys, values and what enters the last feed-forward layer (arXiv:2205.05638)."""

    on_quantized: ClassVar[bool] = True

    kind: Literal["ia3"] = "ia3"


class LohaAdapter(_LowRank):
    """Products of two low-rank factors, element by element (arXiv:2108.06098)."""

    kind: Literal["loha"] = "loha"
    rank: PositiveInt = Field(default=8, description="of the adapter's factors")
    alpha: PositiveInt = Field(default=8, description="the adapter's output is scaled by alpha / rank")


class LokrAdapter(_LowRank):
    """Kronecker products of low-rank factors (arXiv:2212.10650)."""

    kind: Literal["lokr"] = "lokr"
    rank: PositiveInt = Field(default=8, description="of the adapter's factors")
    alpha: PositiveInt = Field(default=8, description="the adapter's output is scaled by alpha / rank")


class _Prompt(Adapter):
    """Virtual tokens before the real ones."""

    on_quantized: ClassVar[bool] = True

    virtual_tokens: PositiveInt = Field(default=20, description="learned tokens before the real ones")

    @property
    def prompt_length(self) -> int:
        """Virtual tokens that it puts before the real ones, which take positions as they do."""
        return self.virtual_tokens

    @property
    def shown(self) -> str:
        """The adapter in words."""
        return f"{self.kind} of {self.virtual_tokens} virtual tokens"


class PrefixAdapter(_Prompt):
    """Keys and values before those of every layer (arXiv:2101.00190)."""

    kind: Literal["prefix"] = "prefix"


class PromptAdapter(_Prompt):
    """Embeddings before those of the input (arXiv:2104.08691)."""

    kind: Literal["prompt"] = "prompt"


class PTuningAdapter(_Prompt):
    """Embeddings before those of the input, made by a small network (arXiv:2103.10385)."""

    kind: Literal["p-tuning"] = "p-tuning"
    encoder_hidden_size: PositiveInt = Field(default=128, description="of the network that makes virtual tokens")


class BitfitAdapter(Adapter):
    """No new weights: the biases are trained, and the head of a classifier (arXiv:2106.10199)."""

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

# Every kind by its name, in the order of the union.
ADAPTERS: dict[str, type[Adapter]] = {
    str(kind.model_fields["kind"].default): kind for kind in get_args(get_args(AnyAdapter)[0])
}


def kinds_with(field: str) -> tuple[str, ...]:
    """Return the kinds that have a field."""
    return tuple(name for name, kind in ADAPTERS.items() if field in kind.model_fields)


# Parts of the names of the weights that adapters add: those of peft's tuners, of its prompts, and of the copies of
# classification heads that it trains beside them.
_NEW_WEIGHTS = ("lora_", "vera_lambda_", "ia3_", "hada_", "lokr_", "prompt_encoder.", "modules_to_save.")


def is_new_weight(name: str) -> bool:
    """Return whether a parameter of that name is an adapter's and not the model's own."""
    return any(part in name for part in _NEW_WEIGHTS)
