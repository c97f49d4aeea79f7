"""A training configuration, one point of the search space, and the metadata of its knobs.

Each field of `TrainConfig` and `Parallelism` has a :class:`Knob` in a table; a loop of one's own declares further ones.
Code that exports, names, predicts or shows knobs reads this metadata instead of listing fields.
"""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, PositiveInt, ValidationInfo, field_validator

from autotune.value import Value, digest_of
from autotune.values.model import ModelFacts
from autotune.values.techniques import AnyAdapter, BackendName, Checkpointing, Mode, why_not

# A value of a knob, as in a search space.
Scalar = bool | int | float | str | None


class Allowance(StrEnum):
    """How much a knob may change of the user's training; each class includes those before it."""

    EXACT = "exact"
    NUMERICS = "numerics"
    OPTIMIZER = "optimizer"
    METHOD = "method"

    @property
    def rank(self) -> int:
        """Position from the strictest (0) to the freest (3)."""
        return list(Allowance).index(self)

    def admits(self, other: "Allowance") -> bool:
        return other.rank <= self.rank

    @classmethod
    def deepest(cls, classes: Iterable["Allowance"]) -> "Allowance":
        """Return the freest of the classes of some changes; `EXACT` without any."""
        return max(classes, key=lambda c: c.rank, default=cls.EXACT)


# The values of `Allowance`, as they are written in declarations of knobs.
AllowanceName = Literal["exact", "numerics", "optimizer", "method"]


class Difference(NamedTuple):
    """A knob whose value differs between the baseline and a configuration."""

    before: Any  # the baseline's value
    after: Any
    facts: ModelFacts
    precision: str  # the configuration's
    is_adapted: bool  # whether the configuration trains an adapter in fp32, beside frozen weights
    rounds: bool  # whether fp32 matrix products run as TF32 in exactly one of the two

    def of_split(self) -> AllowanceName:
        # Another micro-batch is exact, unless the model couples samples (batch norm, router loss).
        if self.facts.split_changes is not None:
            return "method"
        return "numerics" if self.facts.batch_coupled else "exact"

    def of_layout(self) -> AllowanceName:
        # Another layout of the same samples, in rows or over ranks, changes the random numbers of dropout, and padding
        # and size of the micro-batches that a model may couple.
        return "numerics" if self.facts.has_dropout or self.facts.batch_coupled else "exact"

    def of_compiling(self) -> AllowanceName:
        # Compiling may switch TF32 on, and compiled dropout draws other random numbers.
        return "numerics" if self.facts.has_dropout or self.rounds else "exact"

    def of_optimizer(self) -> AllowanceName:
        same_update = {"adamw_torch", "adamw_torch_fused"}  # scheduled differently on the device
        return "exact" if {self.before, self.after} <= same_update else "optimizer"

    def of_precision(self) -> AllowanceName:
        # Weights that are trained in bf16 lose small updates; frozen ones are read by products in bf16 either way.
        return "method" if "pure_bf16" in (self.before, self.after) and not self.is_adapted else "numerics"

    def of_sharding(self) -> AllowanceName:
        # Sharding changes no number in fp32. With 16-bit arithmetic each library rounds in other places: DDP reduces
        # gradients in fp32 and casts operator by operator; accelerate has FSDP reduce in 16 bits and cast whole units
        # (`set_mixed_precision`); replicas add up in two stages; DeepSpeed trains 16-bit weights with fp32 masters.
        libraries = {str(sharding).partition("_")[0] for sharding in (self.before, self.after)}
        return "numerics" if self.precision in ("bf16", "fp16", "fp8") and len(libraries) > 1 else "exact"


@dataclass(frozen=True)
class Knob:
    """A knob: a field and its metadata."""

    allowance: AllowanceName | Callable[[Difference], AllowanceName]  # class of a change, or a function that returns it
    short: str | None = None  # name in tables and on the command line; None: the field's name with hyphens
    _: KW_ONLY
    # When the value is copied to the field of `TrainingArguments` of the same name: always, or unless it is the default
    # of both; None: `training.arguments` maps it in another way.
    argument: Literal["always", "unless default"] | None = None
    is_traced: bool = True  # whether predicted time and memory depend on the knob
    # Name of the feature of the time model's correction that the value switches on: with {} for a value that isn't the
    # field's default, or a function of the value.
    feature: str | Callable[[Any], str | None] | None = None
    field: Any = None  # pydantic's, of the same name; in `KNOBS` alone

    def feature_of(self, value: Any) -> str | None:
        if callable(self.feature):
            return self.feature(value)
        return None if self.feature is None or value == self.field.default else self.feature.format(value)


# Upper bound of the micro-batch in samples: SigLIP's batch (arXiv:2303.15343), the largest published.
LARGEST_BATCH = 1 << 20

# numpy takes seeds of 32 bits; comparing losses takes the next one as well.
LARGEST_SEED = (1 << 32) - 2


class Precision(StrEnum):
    """Number formats of weights and arithmetic; the levels in brackets are those of NVIDIA Apex AMP."""

    FP32 = "fp32"  # [O0]
    FP16 = "fp16"  # [O1/O2] mixed, fp32 weights, loss scaling
    BF16 = "bf16"  # mixed, fp32 weights
    FP8 = "fp8"  # as bf16, but most linear layers multiply in float8 (torchao)
    PURE_BF16 = "pure_bf16"  # [O3] weights, gradients and states in bf16; an adapter is in fp32, under autocast


# Formats of quantized base weights (bitsandbytes); "double" quantizes the scales too.
Quantization = Literal["int8", "nf4", "nf4-double", "fp4", "fp4-double"]

Sharding = Literal["none", "fsdp_full", "fsdp_grad_op", "zero_1", "zero_2", "zero_3"]


class Parallelism(Value):
    """How one training is spread over devices: world size = data x tensor x sequence x model parallel."""

    world_size: PositiveInt = Field(default=1, description="number of processes, one per device")
    sharding: Sharding = Field(
        default="none",
        description="how data-parallel ranks shard weights, gradients and optimizer states: none is DDP, fsdp is "
        "FSDP2, zero is DeepSpeed",
    )
    tensor_parallel: PositiveInt = Field(default=1, description="devices that share each layer's matrices")
    sequence_parallel: PositiveInt = Field(default=1, description="devices that share the tokens of each sample")
    model_parallel: PositiveInt = Field(default=1, description="devices that share each sample in a loop of one's own")
    replicas: PositiveInt = Field(default=1, description="copies of the model that FSDP keeps (HYBRID_SHARD)")
    offload: Literal["none", "optimizer", "parameters"] = Field(
        default="none", description="kept in the host's memory; parameters includes the optimizer states"
    )
    wrapping: Literal["layers", "size"] = Field(
        default="layers", description="FSDP units: each transformer layer, or modules above a number of parameters"
    )
    ddp_bucket_cap_mb: PositiveInt | None = Field(default=None, description="MB of gradients per all-reduce; None: 25")
    ddp_find_unused_parameters: bool | None = Field(
        default=None, description="look for those that take no part, and copy the outputs; None: unless checkpointed"
    )
    ddp_broadcast_buffers: bool | None = Field(
        default=None,
        description="the first rank's buffers, such as the means of batch norm, go to all; None: each step",
    )

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different samples; degrees that don't divide the world size are refused by rule."""
        return max(1, self.world_size // self.shared_by)

    @property
    def shared_by(self) -> int:
        """Number of ranks that work on the same samples."""
        return self.tensor_parallel * self.sequence_parallel * self.model_parallel

    @property
    def context_parallel(self) -> int:
        """Number of devices that share tokens by passing on keys and values, as those beside FSDP do."""
        return self.sequence_parallel if self.sharding.startswith("fsdp") else 1

    @property
    def ranks(self) -> range | None:
        """The ranks that torchrun starts; None: a single process without torchrun."""
        return None if self.is_single else range(self.world_size)

    @property
    def sharding_ranks(self) -> int:
        """Number of ranks that weights, gradients and states are dealt out to: those that share a sample as well."""
        return max(1, self.data_parallel * self.sequence_parallel // self.replicas)

    @property
    def is_single(self) -> bool:
        return self == ONE_DEVICE


ONE_DEVICE = Parallelism()

# Knobs of DDP alone, which TrainingArguments have by the same names.
OF_DDP = tuple(name for name in Parallelism.model_fields if name.startswith("ddp_"))


class OwnValues(Value):
    """Values of the knobs that a loop of one's own declares, as attributes: `config.own.schedule`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Scalar]


class TrainConfig(Value):  # noqa: PLW1641  # the hash of a frozen value is made by pydantic
    """One point of the search space, named as in `transformers.TrainingArguments` where a name exists.

    Examples:
        >>> config = TrainConfig(per_device_train_batch_size=8, precision="bf16", adapter={"kind": "lora", "rank": 8})
        >>> config.optim, config.adapter.target_modules
        ('adamw_torch_fused', 'all-linear')
    """

    per_device_train_batch_size: PositiveInt = Field(le=LARGEST_BATCH, description="the micro-batch, in samples")
    precision: Precision = Precision.FP32
    tf32: bool = Field(default=False, description="TensorFloat-32 for matrix products in fp32, on Ampere and newer")
    optim: str = Field(default="adamw_torch_fused", description="name of the optimizer in transformers")
    checkpointing: Checkpointing = "none"
    attn_implementation: str | None = Field(default=None, description="kernel, as sdpa; None: there is no attention")
    experts_implementation: str | None = Field(default=None, description="as grouped_mm; None: there is no choice")
    experts_per_token: PositiveInt | None = Field(default=None, description="in place of the model's own top-k")
    expert_capacity: PositiveInt | None = Field(default=None, description="tokens of an expert; None: the model's own")
    use_liger_kernel: bool = Field(default=False, description="fused kernels of the package liger-kernel")
    chunked_loss: bool = Field(default=False, description="a causal model's loss is computed a few positions at a time")
    torch_compile_backend: BackendName | None = Field(default=None, description="None: not compiled")
    torch_compile_mode: Mode | None = Field(default=None, description="mode of inductor; None: its default")
    activation_memory_budget: float | None = Field(
        default=None, ge=0, lt=1, description="of a compiled model: share of its activations that it keeps; None: all"
    )
    adapter: AnyAdapter | None = Field(default=None, description="None: all weights are trained")
    quantization: Quantization | None = Field(default=None, description="of frozen base weights; None: not quantized")
    dataloader_num_workers: int = Field(default=0, ge=0, le=1024, description="processes that load data")
    dataloader_prefetch_factor: PositiveInt | None = Field(default=None, le=1024, description="of each worker; None: 2")
    dataloader_pin_memory: bool = Field(default=True, description="copy to the device from pinned memory")
    non_blocking: bool = Field(default=False, description="the host doesn't wait for copies from pinned memory")
    logging_nan_inf_filter: bool = Field(
        default=True, description="wait for each loss, so that none that is NaN or infinite is logged"
    )
    train_sampling_strategy: Literal["random", "sequential", "group_by_length", "batch_rebalance"] = Field(
        default="random",
        description="order of the samples; batch_rebalance: a step's samples are drawn at random, and cut into "
        "micro-batches of about the same cost in tokens, few long samples or many short ones",
    )
    packing: bool = Field(default=False, description="samples of a micro-batch are one row, without padding")
    pad_to_multiple_of: PositiveInt | None = Field(
        default=None, le=1024, description="tokens; None: batches are as long as their longest sample"
    )
    generation_batch_size: PositiveInt | None = Field(
        default=None, le=LARGEST_BATCH, description="completions generated at once; None: of a step"
    )
    precompute_ref_log_probs: bool = Field(
        default=False, description="DPO and KTO run their reference over all data before training"
    )
    torch_empty_cache_steps: PositiveInt | None = Field(
        default=None, le=1_000_000, description="steps between calls of torch.cuda.empty_cache"
    )
    expandable_segments: bool = Field(default=False, description="torch's CUDA allocator enlarges segments in place")
    parallelism: Parallelism = Field(default=ONE_DEVICE, description="how training is spread over devices")
    own: OwnValues = Field(default=OwnValues(), description="values of the knobs that a loop of one's own declares")

    @field_validator("adapter", mode="before")
    @classmethod
    def _usual_kind(cls, adapter: Any) -> Any:
        return {"kind": "lora", **adapter} if isinstance(adapter, dict) else adapter

    @field_validator(
        "precision", "optim", "attn_implementation", "experts_implementation", "quantization", mode="before"
    )
    @classmethod
    def _offered(cls, value: Any, info: ValidationInfo) -> Any:
        reason = why_not(str(info.field_name), value)
        if reason is not None:
            raise ValueError(reason)
        return value

    def __eq__(self, other: object) -> bool:
        # A search compares configurations by the hundred thousand, for which pydantic takes several steps each.
        return self is other or (type(self) is type(other) and self.__dict__ == other.__dict__)

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter in fp32 is trained beside frozen weights; BitFit trains biases of the model."""
        return self.adapter is not None and self.adapter.kind != "bitfit"

    @property
    def mixed_precision(self) -> Literal["no", "bf16", "fp16"]:
        """As accelerate calls it; frozen weights in bf16 have it too, as peft keeps those of adapters in fp32."""
        if self.precision is Precision.PURE_BF16:
            return "bf16" if self.is_adapted and self.parallelism.sharding == "none" else "no"
        mixed: dict[Precision, Literal["no", "fp16"]] = {Precision.FP32: "no", Precision.FP16: "fp16"}
        return mixed.get(self.precision, "bf16")

    @property
    def records_graphs(self) -> bool:
        """Whether steps are recorded as CUDA graphs, where there is a CUDA device."""
        by_mode = self.torch_compile_mode in ("reduce-overhead", "max-autotune")
        return self.torch_compile_backend == "cudagraphs" or (self.torch_compile_backend == "inductor" and by_mode)

    @property
    def is_balanced(self) -> bool:
        """Whether micro-batches of a step have the same cost in tokens, and not the same number of samples."""
        return self.train_sampling_strategy == "batch_rebalance"

    @property
    def config_id(self) -> str:
        """Short hash of what differs from the defaults, so that a knob that is new changes no earlier one's."""
        fields = type(self).model_fields.items()
        return digest_of(self.model_dump(mode="json", exclude={n for n, f in fields if getattr(self, n) == f.default}))


_OF_SAMPLING = {"group_by_length": "grouped", "batch_rebalance": "balanced"}

_KNOBS = {
    "per_device_train_batch_size": Knob(Difference.of_split, "micro-batch", argument="always"),
    "precision": Knob(Difference.of_precision, feature="precision={}".format),
    "tf32": Knob(lambda change: "numerics" if change.rounds else "exact", feature="tf32"),
    "optim": Knob(Difference.of_optimizer, argument="always", feature="optim={}".format),
    "checkpointing": Knob("exact", feature="checkpointing={}"),
    "attn_implementation": Knob("exact", "attention", feature="attention={}".format),
    "experts_implementation": Knob("exact", "experts", feature="experts={}"),
    "experts_per_token": Knob("method"),
    "expert_capacity": Knob("method"),
    "use_liger_kernel": Knob("numerics", "liger", argument="unless default", feature="liger"),
    "chunked_loss": Knob("numerics", feature="chunked-loss"),
    "torch_compile_backend": Knob(Difference.of_compiling, "compile", argument="unless default", feature="compile={}"),
    "torch_compile_mode": Knob(Difference.of_compiling, "compile-mode", argument="unless default"),
    "activation_memory_budget": Knob("numerics", feature="activation-budget={}"),
    "adapter": Knob("method", feature="adapter"),
    "quantization": Knob("method", feature=lambda kind: kind and f"quantization={kind.partition('-')[0]}"),
    "dataloader_num_workers": Knob("exact", "workers", argument="always", is_traced=False, feature="workers"),
    "dataloader_prefetch_factor": Knob("exact", "prefetch", argument="unless default", is_traced=False),
    "dataloader_pin_memory": Knob("exact", "pin-memory", argument="always", is_traced=False),
    "non_blocking": Knob("exact", "non-blocking", is_traced=False, feature="non-blocking"),
    "logging_nan_inf_filter": Knob("exact", "nan-filter", argument="unless default", is_traced=False, feature="nans"),
    "train_sampling_strategy": Knob("numerics", "sampling", argument="always", feature=_OF_SAMPLING.get),
    "packing": Knob(Difference.of_layout, feature="packed"),
    "pad_to_multiple_of": Knob(Difference.of_layout, feature="padded={}"),
    "generation_batch_size": Knob("exact", "generation-batch"),
    "precompute_ref_log_probs": Knob("exact", "precompute-ref"),
    "torch_empty_cache_steps": Knob(
        "exact", "empty-cache", argument="unless default", is_traced=False, feature="empty-cache={}"
    ),
    "expandable_segments": Knob("exact", feature="expandable-segments", is_traced=False),
    "parallelism.world_size": Knob(Difference.of_layout, "devices", feature="several"),
    "parallelism.sharding": Knob(Difference.of_sharding, "sharding", feature="sharding={}"),
    "parallelism.tensor_parallel": Knob(Difference.of_layout, "tensor-parallel"),
    "parallelism.sequence_parallel": Knob(Difference.of_layout, "sequence-parallel"),
    "parallelism.model_parallel": Knob(Difference.of_layout, "model-parallel"),
    "parallelism.replicas": Knob(Difference.of_sharding, "fsdp-replicas"),
    "parallelism.offload": Knob("exact", "offload"),
    "parallelism.wrapping": Knob("exact", "fsdp-wrapping"),
    "parallelism.ddp_bucket_cap_mb": Knob("exact", "ddp-bucket-cap-mb"),
    "parallelism.ddp_find_unused_parameters": Knob("exact", "ddp-find-unused"),
    "parallelism.ddp_broadcast_buffers": Knob(  # each rank keeps its own means of batch norm
        lambda change: "numerics" if change.facts.batch_coupled else "exact", "ddp-broadcast-buffers"
    ),
}

_FIELDS = {name: field for name, field in TrainConfig.model_fields.items() if name not in ("parallelism", "own")}
_FIELDS |= {f"parallelism.{name}": field for name, field in Parallelism.model_fields.items()}
assert set(_FIELDS) == set(_KNOBS), "a field without its Knob, or the other way round"

# Every knob by its name, in the order of `TrainConfig`; those of `Parallelism` as "parallelism.NAME".
KNOBS = {name: replace(_KNOBS[name], field=field) for name, field in _FIELDS.items()}

# Returns the values of a configuration's knobs, in the order of `KNOBS`.
knob_values: Callable[[TrainConfig], tuple[Any, ...]] = attrgetter(*KNOBS)
