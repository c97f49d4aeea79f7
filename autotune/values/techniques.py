"""Tables of techniques: checkpointing, backends of torch.compile, optimizers, adapters, and values not offered.

Activation checkpointing stores the inputs of layers and computes their activations again in the backward pass
(arXiv:1604.06174). `OPTIMIZERS` has a row for each name of `OptimizerNames` in transformers 5.23 (a test compares it
with the installed version), from its `trainer_optimizer.py` and from running each; `cost.optimizers` has their memory
and time. peft implements all kinds of adapters but BitFit; `training.adapters` maps them to peft's arguments.
"""

from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field, PositiveInt

from autotune.errors import suggestion
from autotune.value import Value

Checkpointing = Literal["none", "full", "every-2nd", "every-4th", "offload"]


class CheckpointingKind(NamedTuple):
    """Options of a kind of activation checkpointing."""

    every: int = 1  # every n-th layer is checkpointed; the others store their activations
    offload: bool = False  # inputs of layers are stored in pinned host memory


CHECKPOINTING: dict[Checkpointing, CheckpointingKind] = {
    "full": CheckpointingKind(),
    "every-2nd": CheckpointingKind(every=2),
    "every-4th": CheckpointingKind(every=4),
    "offload": CheckpointingKind(offload=True),
}
assert {"none", *CHECKPOINTING} == set(get_args(Checkpointing))


def checkpointing_arguments(kind: Checkpointing, transformers: tuple[int, int]) -> dict[str, object]:
    # transformers 5.23 renamed it, and keeps the older name as an alias until 6.
    name = "activation_checkpointing" if transformers >= (5, 23) else "gradient_checkpointing"
    if kind == "none":
        return {name: False}
    row = CHECKPOINTING[kind]
    options: dict[str, object] = {"use_reentrant": False}
    if row.every > 1:
        options["every_n_layers"] = row.every
    if row.offload:
        options["offload"] = True
    return {name: True, f"{name}_kwargs": options}


def checkpointing_of(options: dict[str, object]) -> Checkpointing:
    """Return the kind that a user's `activation_checkpointing_kwargs` mean; raises ValueError if none does."""
    # Not torch's reentrant implementation: the same numbers, but no layer's output is held while it runs again.
    known = {"use_reentrant", "every_n_layers", "offload"}
    wanted = (options.get("every_n_layers", 1), options.get("offload", False))
    for name, row in CHECKPOINTING.items():
        if (row.every, row.offload) == wanted and options.keys() <= known:
            return name
    raise ValueError(f"checkpointing with {options} is none of {', '.join(CHECKPOINTING)}")


# Backends of torch.compile that train. `aot_eager` and `eager` run the traced graph as it is, slower than without
# compiling, to find the stage that causes an error. All others (`torch._dynamo.list_backends(exclude_tags=())`) run
# forward passes only, need an accelerator other than a GPU, or are gone from torch.
BackendName = Literal["inductor", "cudagraphs", "aot_eager", "eager"]

# Modes of inductor: `torch._inductor.list_mode_options()`.
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

# Reasons why values that guides recommend are not offered.
_REASONS = {
    ("attn_implementation", "bettertransformer"): "BetterTransformer is gone from transformers; sdpa replaced it",
    ("optim", "adamw_hf"): "adamw_hf is gone from transformers 5; use adamw_torch",
    ("optim", "adamw_apex_fused"): "adamw_apex_fused is gone from transformers 5; use adamw_torch_fused",
    ("optim", "adamw"): "there are several: adamw_torch_fused (the Trainer's default), adamw_torch, adamw_bnb_8bit ...",
    ("adapter", "qlora"): "QLoRA is LoRA on weights of 4 bits: --fix adapter=lora,quantization=nf4",
}


HUB_EXPERTS = frozenset({"deepgemm", "sonicmoe"})  # kernels from the hub


def why_not(parameter: str, value: object) -> str | None:
    if not isinstance(value, str):
        return None
    if parameter == "quantization" and "qat" in value.lower():
        return (
            "quantization-aware training is not offered (transformers' Trainer has no way to it, torchao's is a recipe "
            "of its own); nf4 or int8 train an adapter on packed weights"
        )
    is_kernel = parameter in ("attn_implementation", "experts_implementation")
    if is_kernel and ("/" in value or value in HUB_EXPERTS):
        return "kernels of a repository on the hub are not offered: its code would run by name alone"
    reason = _REASONS.get((parameter, value.lower()))
    if reason is None and parameter == "optim" and value not in OPTIMIZERS:
        return f"transformers has no optimizer {value!r}{suggestion(value, OPTIMIZERS)}"
    return reason


class OptimizerFacts(NamedTuple):
    """Requirements and properties of an optimizer."""

    class_name: str = ""  # qualified name of the class that runs
    package: str | None = None  # distribution that it needs beside torch and transformers
    device: Literal["any", "cuda"] = "any"  # cuda: its kernels need CUDA
    compiles: bool = False  # its step uses torch.compile, which needs a C++ compiler on a CPU
    targets: bool = False  # it projects the gradients of chosen layers, which `optim_target_modules` has to name
    updates_in_backward: bool = False  # it updates weights during each backward pass, of every micro-batch
    attributes: tuple[tuple[str, object], ...] = ()  # a trial verifies them (`execution.effects`)
    takes_bf16: bool = True  # whether it has kernels for gradients in bf16 on CUDA
    unusable: str | None = None  # why it can't run anywhere; None: it can


def _torch(name: str, **attributes: object) -> OptimizerFacts:
    return OptimizerFacts(f"torch.optim.{name}", attributes=tuple(attributes.items()))


def _bitsandbytes(name: str, bits: int, *, paged: bool = False) -> OptimizerFacts:
    attributes: tuple[tuple[str, object], ...] = (("optim_bits", bits), *([("is_paged", True)] if paged else []))
    return OptimizerFacts(
        f"bitsandbytes.optim.{name}",
        package="bitsandbytes",
        device="cuda" if paged else "any",
        attributes=attributes,
        takes_bf16=name != "rmsprop.RMSprop",
    )


def _projected(name: str, *, layerwise: bool = False, cuda: bool = False) -> OptimizerFacts:
    return OptimizerFacts(
        "transformers.trainer_pt_utils.LayerWiseDummyOptimizer" if layerwise else name,
        package=name.partition(".")[0].replace("_", "-"),
        device="cuda" if cuda else "any",
        targets=True,
        updates_in_backward=layerwise,
    )


OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adafactor": OptimizerFacts("transformers.optimization.Adafactor"),
    "adagrad": _torch("adagrad.Adagrad"),
    "adalomo": OptimizerFacts(
        "lomo_optim.adalomo.AdaLomo", package="lomo-optim", device="cuda", updates_in_backward=True
    ),
    "adamw_8bit": _bitsandbytes("adamw.AdamW", 8),
    "adamw_anyprecision": OptimizerFacts(
        unusable="torchdistx, which it is from, is archived and has no build for this torch; pure_bf16 with "
        "adafactor or adamw_bnb_8bit saves as much"
    ),
    "adamw_bnb_8bit": _bitsandbytes("adamw.AdamW", 8),
    "adamw_torch": _torch("adamw.AdamW", fused=None),
    "adamw_torch_4bit": OptimizerFacts("torchao.optim.adam.AdamW4bit", package="torchao", compiles=True),
    "adamw_torch_8bit": OptimizerFacts("torchao.optim.adam.AdamW8bit", package="torchao", compiles=True),
    "adamw_torch_fused": _torch("adamw.AdamW", fused=True),
    "adamw_torch_npu_fused": OptimizerFacts(unusable="it needs an Ascend NPU (torch_npu)"),
    "adamw_torch_xla": OptimizerFacts(unusable="it needs an XLA device (torch_xla)"),
    "ademamix": _bitsandbytes("ademamix.AdEMAMix", 32),
    "ademamix_8bit": _bitsandbytes("ademamix.AdEMAMix", 8),
    "apollo_adamw": _projected("apollo_torch.apollo.AdamW"),
    "apollo_adamw_layerwise": _projected("apollo_torch.apollo.AdamW", layerwise=True),
    "galore_adafactor": _projected("galore_torch.adafactor.Adafactor"),
    "galore_adafactor_layerwise": OptimizerFacts(
        unusable="transformers gives it a learning rate and a relative step, which it refuses; galore_adafactor works"
    ),
    "galore_adamw": _projected("galore_torch.adamw.AdamW"),
    "galore_adamw_8bit": _projected("galore_torch.adamw8bit.AdamW8bit", cuda=True),
    "galore_adamw_8bit_layerwise": _projected("galore_torch.adamw8bit.AdamW8bit", layerwise=True, cuda=True),
    "galore_adamw_layerwise": _projected("galore_torch.adamw.AdamW", layerwise=True),
    "grokadamw": OptimizerFacts("grokadamw.grokadamw.GrokAdamW", package="grokadamw"),
    "lion_32bit": _bitsandbytes("lion.Lion", 32),
    "lion_8bit": _bitsandbytes("lion.Lion", 8),
    "lomo": OptimizerFacts("lomo_optim.lomo.Lomo", package="lomo-optim", updates_in_backward=True),
    "paged_ademamix_32bit": _bitsandbytes("ademamix.AdEMAMix", 32, paged=True),
    "paged_ademamix_8bit": _bitsandbytes("ademamix.AdEMAMix", 8, paged=True),
    "paged_adamw_32bit": _bitsandbytes("adamw.AdamW", 32, paged=True),
    "paged_adamw_8bit": _bitsandbytes("adamw.AdamW", 8, paged=True),
    "paged_lion_32bit": _bitsandbytes("lion.Lion", 32, paged=True),
    "paged_lion_8bit": _bitsandbytes("lion.Lion", 8, paged=True),
    "rmsprop": _torch("rmsprop.RMSprop"),
    "rmsprop_bnb": _bitsandbytes("rmsprop.RMSprop", 32),
    "rmsprop_bnb_32bit": _bitsandbytes("rmsprop.RMSprop", 32),
    "rmsprop_bnb_8bit": _bitsandbytes("rmsprop.RMSprop", 8),  # small weights have states in 32 bits
    "schedule_free_adamw": OptimizerFacts("schedulefree.adamw_schedulefree.AdamWScheduleFree", package="schedulefree"),
    "schedule_free_radam": OptimizerFacts("schedulefree.radam_schedulefree.RAdamScheduleFree", package="schedulefree"),
    "schedule_free_sgd": OptimizerFacts("schedulefree.sgd_schedulefree.SGDScheduleFree", package="schedulefree"),
    "sgd": _torch("sgd.SGD"),
    "stable_adamw": OptimizerFacts("optimi.stableadamw.StableAdamW", package="torch-optimi"),
}


# Adapters

Targets = Literal["all-linear", "attention", "all-linear+experts"]

# 2^16 is above the width of any published layer's input.
Rank = Annotated[PositiveInt, Field(le=1 << 16, description="rank of the adapter's factors")]
Alpha = Annotated[PositiveInt, Field(le=1 << 16, description="the adapter's output is scaled by alpha / rank")]
Dropout = Annotated[float, Field(ge=0.0, lt=1.0, description="dropout of the adapter's input")]


class Adapter(Value):
    """Base class of the kinds of adapters."""

    kind: str

    @property
    def prompt_length(self) -> int:
        """Number of virtual tokens; they take up positions of the model."""
        return int(vars(self).get("virtual_tokens", 0))  # asked of every configuration: pydantic's own look-up is slow

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
    dropout: Dropout = 0.0


class LoraAdapter(_LoraFamily):
    """Low-rank adapters beside frozen weights (arXiv:2106.09685)."""

    kind: Literal["lora"] = "lora"


class RsloraAdapter(_LoraFamily):
    """LoRA scaled by alpha / sqrt(rank), which stays stable at high ranks (arXiv:2312.03732)."""

    kind: Literal["rslora"] = "rslora"


class DoraAdapter(_LoraFamily):
    """LoRA of the direction of each weight, and a trained magnitude (arXiv:2402.09353)."""

    kind: Literal["dora"] = "dora"


class VeraAdapter(_Ranked):
    """Trained vectors that scale frozen random factors, which all layers share (arXiv:2310.11454)."""

    kind: Literal["vera"] = "vera"
    rank: Rank = 256
    dropout: Dropout = 0.0


class Ia3Adapter(Adapter):
    """Trained vectors that scale keys, values and the input of the last feed-forward layer (arXiv:2205.05638)."""

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
    encoder_hidden_size: PositiveInt = Field(default=128, description="of the network that computes the tokens")


class BitfitAdapter(Adapter):
    """Trains the biases and the head of a classifier, without new weights (arXiv:2106.10199)."""

    kind: Literal["bitfit"] = "bitfit"


_Any = (
    LoraAdapter | RsloraAdapter | DoraAdapter | VeraAdapter | Ia3Adapter | LohaAdapter | LokrAdapter
    | PrefixAdapter | PromptAdapter | PTuningAdapter | BitfitAdapter
)  # fmt: skip
AnyAdapter = Annotated[_Any, Field(discriminator="kind")]


class OwnAdapter(Adapter):
    """The adapter that a user's code puts on its model itself."""

    kind: Literal["own"] = "own"
    arguments: str = Field(description="of peft's config class where they aren't its defaults, and peft_type, as JSON")


# Every kind by its name, in the order of the union.
ADAPTERS: dict[str, type[Adapter]] = {kind.model_fields["kind"].default: kind for kind in get_args(_Any)}


def kinds_with(field: str) -> tuple[str, ...]:
    return tuple(name for name, kind in ADAPTERS.items() if field in kind.model_fields)


def is_new_weight(name: str) -> bool:
    """Return whether a parameter of that name belongs to an adapter and not to the model."""
    # Of peft's tuners, its prompts, and its copies of classification heads.
    parts = ("lora_", "vera_lambda_", "ia3_", "hada_", "lokr_", "prompt_encoder.", "modules_to_save.")
    return any(part in name for part in parts)
