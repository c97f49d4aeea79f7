"""A training configuration: one point of the search space. Each field is a knob, described by its metadata."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from autotune.value import Value
from autotune.values import knob
from autotune.values.adapters import AnyAdapter
from autotune.values.knob import Knob, each, knobs_of
from autotune.values.optimizers import OptimizerName
from autotune.values.techniques import BackendName, Checkpointing, Mode, why_not

# Upper bound of the micro-batch in samples: SigLIP's batch (arXiv:2303.15343), the largest published.
LARGEST_BATCH = 1 << 20

# numpy takes seeds of 32 bits; comparing losses takes the next one as well.
LARGEST_SEED = (1 << 32) - 2

# Upper bound of the processes that load data, and of batches that each prepares: more than a machine has cores.
_MOST_WORKERS = 1024


class Precision(StrEnum):
    """Number formats of weights and arithmetic; the levels in brackets are those of NVIDIA Apex AMP."""

    FP32 = "fp32"  # [O0]
    FP16 = "fp16"  # [O1/O2] mixed, fp32 weights, loss scaling
    BF16 = "bf16"  # mixed, fp32 weights
    PURE_BF16 = "pure_bf16"  # [O3] weights, gradients and states in bf16


# Formats of quantized base weights (bitsandbytes); "double" quantizes the scales too.
Quantization = Literal["int8", "nf4", "nf4-double", "fp4", "fp4-double"]

Sharding = Literal["none", "fsdp_full", "fsdp_grad_op", "zero_1", "zero_2", "zero_3"]


class Parallelism(Value):
    """How one training is spread over devices: world size = data x tensor x sequence parallel."""

    world_size: Annotated[PositiveInt, Knob(knob.of_redrawing, "devices", feature="several")] = Field(
        default=1, description="number of processes, one per device"
    )
    sharding: Annotated[Sharding, Knob(knob.of_sharding, "sharding", feature="sharding={}")] = Field(
        default="none",
        description="how data-parallel ranks shard weights, gradients and optimizer states: none is DDP, fsdp is "
        "FSDP2, zero is DeepSpeed",
    )
    tensor_parallel: Annotated[PositiveInt, Knob(knob.of_redrawing, "tensor-parallel")] = Field(
        default=1, description="devices that share each layer's matrices"
    )
    sequence_parallel: Annotated[PositiveInt, Knob(knob.of_redrawing, "sequence-parallel")] = Field(
        default=1,
        exclude_if=lambda degree: degree == 1,
        description="devices that share the tokens of each sample, by DeepSpeed's Ulysses (ALST)",
    )
    offload: Annotated[Literal["none", "optimizer", "parameters"], Knob("exact", "offload")] = Field(
        default="none", description="what the host's memory keeps; parameters includes the optimizer states"
    )
    wrapping: Annotated[Literal["layers", "size"], Knob("exact", "fsdp-wrapping")] = Field(
        default="layers", description="FSDP units: each transformer layer, or modules above a number of parameters"
    )
    ddp_bucket_cap_mb: Annotated[PositiveInt | None, Knob("exact", "ddp-bucket-cap-mb")] = Field(
        default=None, description="MB of gradients per all-reduce; None: 25"
    )
    ddp_static_graph: Annotated[bool, Knob("exact", "ddp-static-graph")] = Field(
        default=False, description="the same parameters take part in every step"
    )

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different samples; degrees that don't divide the world size are refused by rule."""
        return max(1, self.world_size // (self.tensor_parallel * self.sequence_parallel))

    @property
    def sharding_ranks(self) -> int:
        """Number of ranks that weights, gradients and states are dealt out to: those that share a sample as well."""
        return self.data_parallel * self.sequence_parallel

    @property
    def is_single(self) -> bool:
        """Whether training is one process on one device, without sharding or offload."""
        return self == ONE_DEVICE


ONE_DEVICE = Parallelism()


class TrainConfig(Value):
    """One point of the search space, named as in `transformers.TrainingArguments` where a name exists.

    Examples:
        >>> config = TrainConfig(per_device_train_batch_size=8, precision="bf16", adapter={"kind": "lora", "rank": 8})
        >>> config.optim, config.adapter.target_modules
        ('adamw_torch_fused', 'all-linear')
    """

    per_device_train_batch_size: Annotated[PositiveInt, Knob(knob.of_split, "micro-batch", argument="always")] = Field(
        le=LARGEST_BATCH, description="the micro-batch, in samples"
    )
    precision: Annotated[Precision, Knob(knob.of_precision, feature=each("precision={}"))] = Precision.FP32
    tf32: Annotated[bool, Knob(knob.of_rounding, feature="tf32", word="tf32")] = Field(
        default=False, description="TensorFloat-32 for what runs in fp32 on Ampere and newer"
    )
    optim: Annotated[OptimizerName, Knob(knob.of_optimizer, argument="always", feature=each("optim={}"))] = Field(
        default="adamw_torch_fused", description="name of the optimizer in transformers"
    )
    checkpointing: Annotated[Checkpointing, Knob("exact", feature="checkpointing={}", word="checkpointing {}")] = "none"
    # None: the model has no attention.
    attn_implementation: Annotated[
        str | None, Knob("exact", "attention", feature=each("attention={}"), word="{} attention")
    ] = Field(default=None, description="attention kernel, such as sdpa, eager or flash_attention_2")
    # None: the model has no experts to choose for.
    experts_implementation: Annotated[str | None, Knob("exact", "experts", feature="experts={}", word="{} experts")] = (
        Field(default=None, description="how experts run: grouped_mm, batched_mm or eager")
    )
    experts_per_token: Annotated[PositiveInt | None, Knob("method", word="{} experts a token")] = Field(
        default=None, description="in place of the model's own top-k"
    )
    expert_capacity: Annotated[PositiveInt | None, Knob("method", word="expert capacity {}")] = Field(
        default=None, description="tokens an expert takes, in place of the model's own capacity"
    )
    use_liger_kernel: Annotated[
        bool, Knob("numerics", "liger", argument="unless default", feature="liger", word="Liger")
    ] = Field(default=False, description="fused kernels of the package liger-kernel")
    chunked_loss: Annotated[bool, Knob("numerics", feature="chunked-loss", word="chunked loss")] = Field(
        default=False,
        exclude_if=lambda is_on: not is_on,
        description="a causal model's logits and loss are worked out for a few positions at a time",
    )
    torch_compile_backend: Annotated[
        BackendName | None,
        Knob(knob.of_compiling, "compile", argument="unless default", feature="compile={}", word="compile {}"),
    ] = Field(default=None, description="None: not compiled")
    torch_compile_mode: Annotated[
        Mode | None, Knob(knob.of_compiling, "compile-mode", argument="unless default", word=" {}")
    ] = Field(default=None, description="mode of inductor; None: its default")
    activation_memory_budget: Annotated[
        float | None, Knob("numerics", feature="activation-budget={}", word="activation budget {}")
    ] = Field(
        default=None,
        ge=0,
        lt=1,
        exclude_if=lambda share: share is None,
        description="share of its activations that a compiled model keeps for the backward pass, which works out the "
        "others again (torch._functorch.config); None: all",
    )
    adapter: Annotated[AnyAdapter | None, Knob("method", feature="adapter", word="{0.shown}")] = Field(
        default=None, description="None: all weights are trained"
    )
    quantization: Annotated[
        Quantization | None,
        Knob("method", feature=lambda kind: kind and f"quantization={kind.partition('-')[0]}", word="{} base weights"),
    ] = Field(default=None, description="format of the frozen base weights; None: not quantized")
    dataloader_num_workers: Annotated[
        int, Knob("exact", "workers", argument="always", is_traced=False, feature="workers", word="{} workers")
    ] = Field(default=0, ge=0, le=_MOST_WORKERS, description="processes that load data")
    # None: torch's 2.
    dataloader_prefetch_factor: Annotated[
        PositiveInt | None, Knob("exact", "prefetch", argument="unless default", is_traced=False)
    ] = Field(default=None, le=_MOST_WORKERS, description="batches that each worker prepares ahead")
    dataloader_pin_memory: Annotated[bool, Knob("exact", "pin-memory", argument="always", is_traced=False)] = Field(
        default=True, description="copy to the device from pinned memory"
    )
    train_sampling_strategy: Annotated[
        Literal["random", "sequential", "group_by_length", "batch_rebalance"],
        Knob(
            "numerics",
            "sampling",
            argument="always",
            feature={"group_by_length": "grouped", "batch_rebalance": "balanced"}.get,
            word={"group_by_length": "grouped by length", "batch_rebalance": "balanced by tokens"}.get,
        ),
    ] = Field(
        default="random",
        description="order of the samples; batch_rebalance: a step's samples are drawn at random, and cut into "
        "micro-batches of about the same cost in tokens, few long samples or many short ones",
    )
    packing: Annotated[bool, Knob(knob.of_redrawing, feature="packed", word="packed")] = Field(
        default=False, description="concatenate the samples of a micro-batch into one row, without padding"
    )
    generation_batch_size: Annotated[
        PositiveInt | None, Knob("exact", "generation-batch", word="{} generated at once")
    ] = Field(
        default=None,
        le=LARGEST_BATCH,
        exclude_if=lambda size: size is None,
        description="completions that GRPO and RLOO generate at once, in samples; None: those of a step",
    )
    precompute_ref_log_probs: Annotated[bool, Knob("exact", "precompute-ref", word="reference worked out before")] = (
        Field(
            default=False,
            exclude_if=lambda is_on: not is_on,
            description="DPO and KTO run their reference model over all data before training, and drop it then",
        )
    )
    torch_empty_cache_steps: Annotated[
        PositiveInt | None,
        Knob(
            "exact",
            "empty-cache",
            argument="unless default",
            is_traced=False,
            feature="empty-cache={}",
            word="cache emptied every {} steps",
        ),
    ] = Field(
        default=None,
        le=1_000_000,
        exclude_if=lambda steps: steps is None,
        description="steps between calls of torch.cuda.empty_cache; None: never",
    )
    expandable_segments: Annotated[
        bool, Knob("exact", feature="expandable-segments", word="expandable segments", is_traced=False)
    ] = Field(
        default=False,
        exclude_if=lambda is_on: not is_on,
        description="torch's CUDA allocator enlarges its segments in place (PYTORCH_ALLOC_CONF)",
    )
    parallelism: Parallelism = Field(default=ONE_DEVICE, description="how training is spread over devices")

    @field_validator("adapter", mode="before")
    @classmethod
    def _usual_kind(cls, adapter: Any) -> Any:
        return {"kind": "lora", **adapter} if isinstance(adapter, dict) else adapter

    @field_validator("precision", "attn_implementation", "experts_implementation", "quantization", mode="before")
    @classmethod
    def _offered(cls, value: Any, info: ValidationInfo) -> Any:
        reason = why_not(str(info.field_name), value)
        if reason is not None:
            raise ValueError(reason)
        return value

    @property
    def is_balanced(self) -> bool:
        """Whether micro-batches of a step have the same cost in tokens, and not the same number of samples."""
        return self.train_sampling_strategy == "batch_rebalance"

    @property
    def config_id(self) -> str:
        """Short hash of the canonical JSON."""
        return self.digest()


# Every knob by its name, with its field, in the order of `TrainConfig`; those of `Parallelism` as "parallelism.NAME".
KNOBS = knobs_of(TrainConfig)

# Returns the values of a configuration's knobs, in the order of `KNOBS`.
knob_values: Callable[[TrainConfig], tuple[Any, ...]] = attrgetter(*KNOBS)
