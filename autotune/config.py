"""The values a search is made of: configuration, workload, budget, allowance.

A :class:`TrainConfig` is one point of the search space, a :class:`Workload` what every point has to do.
Nothing here acts when constructed, and derived values are properties.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from autotune.architecture import ModelSpec, Task
from autotune.errors import suggestion
from autotune.values import Value

SYNTHETIC_SAMPLES = 512

# transformers.training_args.OptimizerNames of 5.23, not imported because that takes seconds.
OPTIMIZERS = frozenset(
    {
        "adafactor", "adagrad", "adalomo", "adamw_8bit", "adamw_anyprecision", "adamw_bnb_8bit", "adamw_torch",
        "adamw_torch_4bit", "adamw_torch_8bit", "adamw_torch_fused", "adamw_torch_npu_fused", "adamw_torch_xla",
        "ademamix", "ademamix_8bit", "apollo_adamw", "apollo_adamw_layerwise", "galore_adafactor",
        "galore_adafactor_layerwise", "galore_adamw", "galore_adamw_8bit", "galore_adamw_8bit_layerwise",
        "galore_adamw_layerwise", "grokadamw", "lion_32bit", "lion_8bit", "lomo", "paged_ademamix_32bit",
        "paged_ademamix_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_lion_32bit", "paged_lion_8bit",
        "rmsprop", "rmsprop_bnb", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit", "schedule_free_adamw",
        "schedule_free_radam", "schedule_free_sgd", "sgd", "stable_adamw",
    }
)  # fmt: skip
_GONE_OPTIMIZERS = {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"}


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

    def admits(self, other: Allowance) -> bool:
        """Whether a change of class `other` is allowed."""
        return other.rank <= self.rank


class Precision(StrEnum):
    """Numbers of weights and arithmetic; in brackets the name of the old AMP levels."""

    FP32 = "fp32"  # [O0]
    FP16 = "fp16"  # [O1/O2] mixed, fp32 weights, loss scaling
    BF16 = "bf16"  # mixed, fp32 weights
    PURE_BF16 = "pure_bf16"  # [O3] weights, gradients and states in bf16


class LoraAdapter(Value):
    """Low-rank adapters beside frozen weights (arXiv:2106.09685)."""

    kind: Literal["lora"] = "lora"
    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: Literal["all-linear", "attention"] = "all-linear"


class TrainConfig(Value):
    """One point of the search space, named as in `transformers.TrainingArguments` where a name exists."""

    per_device_train_batch_size: PositiveInt = Field(description="the micro-batch, in samples")
    precision: Precision = Precision.FP32
    tf32: bool = Field(default=False, description="TensorFloat-32 for what runs in fp32 on Ampere and newer")
    optim: str = Field(default="adamw_torch_fused", description="a value of transformers' OptimizerNames")
    checkpointing: Literal["none", "full"] = "none"
    attn_implementation: str | None = Field(default=None, description="None: the model has no attention")
    torch_compile_backend: str | None = Field(default=None, description="None: not compiled")
    adapter: LoraAdapter | None = Field(default=None, description="None: all weights are trained")
    dataloader_num_workers: int = Field(default=0, ge=0)
    dataloader_pin_memory: bool = True

    @field_validator("optim")
    @classmethod
    def _known_optimizer(cls, name: str) -> str:
        if name in _GONE_OPTIMIZERS:
            raise ValueError(f"{name} is gone from transformers 5; use {_GONE_OPTIMIZERS[name]}")
        if name not in OPTIMIZERS:
            raise ValueError(f"transformers has no optimizer {name!r}{suggestion(name, OPTIMIZERS)}")
        return name

    @property
    def config_id(self) -> str:
        """Short hash of the canonical JSON."""
        return self.digest()


class LengthProfile(Value):
    """Lengths of the samples in tokens, after truncation to the sequence length."""

    samples: PositiveInt
    mean: float
    minimum: int
    median: int
    p95: int
    maximum: int
    mean_target: float | None = Field(default=None, description="of the decoder's targets, where there are any")


class Workload(Value):
    """What every trial has to train: held fixed, so that throughputs can be compared."""

    model: ModelSpec
    task: Task
    sequence_length: PositiveInt = Field(description="tokens; longer samples are cut")
    target_length: PositiveInt | None = Field(default=None, description="decoder tokens, encoder-decoders only")
    global_batch_size: PositiveInt | None = Field(description="samples per optimizer step; None: free")
    dataset: str | None = Field(default=None, description="file of real data; None: synthetic samples")
    text_field: str | None = None
    lengths: LengthProfile | None = Field(default=None, description="of the real data")
    seed: int = 42
    fixed_arguments: dict[str, Any] = Field(
        default_factory=dict, description="the user's TrainingArguments that no search touches"
    )

    def accumulation_steps(self, config: TrainConfig) -> int:
        """Return micro-batches per optimizer step on one device.

        Raises:
            ValueError: The micro-batch doesn't divide the global batch.
        """
        if self.global_batch_size is None:
            return 1
        steps, rest = divmod(self.global_batch_size, config.per_device_train_batch_size)
        if rest or not steps:
            raise ValueError(
                f"a micro-batch of {config.per_device_train_batch_size} does not divide the global batch of "
                f"{self.global_batch_size}"
            )
        return steps

    def samples_per_step(self, config: TrainConfig) -> int:
        """Return the samples of one optimizer step."""
        return self.accumulation_steps(config) * config.per_device_train_batch_size

    @property
    def tokens_per_sample(self) -> float | None:
        """Mean tokens of a sample, source and target together; None for images."""
        if not self.task.takes_text:
            return None
        if self.lengths is None:
            return float(self.sequence_length + (self.target_length or 0))
        return self.lengths.mean + (self.lengths.mean_target or 0.0)


class Effort(StrEnum):
    """The one dial: how long a search may take and how surely it ends."""

    QUICK = "quick"
    STANDARD = "standard"
    THOROUGH = "thorough"


class Budget(Value):
    """Limits of a search and of each of its trials."""

    effort: Effort
    max_trials: PositiveInt = Field(description="trials of the search, finalists not counted")
    max_time_s: float = Field(gt=0, description="whole search, finalists included")
    trial_timeout_s: float = Field(gt=0, description="one trial from launch to exit")
    discarded_steps: PositiveInt = Field(description="optimizer steps before the clock starts, at the least")
    discarded_s: float = Field(ge=0, description="seconds of training before the clock starts, at the least")
    measure_steps: int = Field(ge=2, description="measured optimizer steps at the most")
    measure_time_s: float = Field(gt=0, description="measuring ends after the step that reaches this")
    relative_interval: float = Field(gt=0, description="measuring ends when the 95 % half-width is below this")
    finalists: PositiveInt = Field(description="configurations measured again beside the baseline")
    final_rounds: PositiveInt = Field(description="times each finalist and the baseline are measured, in turn")

    @model_validator(mode="after")
    def _check(self) -> Budget:
        if self.trial_timeout_s > self.max_time_s:
            raise ValueError(f"a trial of {self.trial_timeout_s} s is longer than the search of {self.max_time_s} s")
        return self

    @classmethod
    def of(cls, effort: Effort) -> Budget:
        """Return the limits that `effort` stands for."""
        return _BUDGETS[effort]


_BUDGETS = {
    # quick: an answer within five minutes on two CPU cores
    Effort.QUICK: Budget(
        effort=Effort.QUICK,
        max_trials=12,
        max_time_s=285,
        trial_timeout_s=120,
        discarded_steps=1,
        discarded_s=0.5,
        measure_steps=12,
        measure_time_s=8,
        relative_interval=0.04,
        finalists=1,
        final_rounds=2,
    ),
    Effort.STANDARD: Budget(
        effort=Effort.STANDARD,
        max_trials=40,
        max_time_s=2400,
        trial_timeout_s=300,
        discarded_steps=2,
        discarded_s=2,
        measure_steps=40,
        measure_time_s=20,
        relative_interval=0.02,
        finalists=2,
        final_rounds=2,
    ),
    Effort.THOROUGH: Budget(
        effort=Effort.THOROUGH,
        max_trials=150,
        max_time_s=10800,
        trial_timeout_s=900,
        discarded_steps=3,
        discarded_s=3,
        measure_steps=100,
        measure_time_s=45,
        relative_interval=0.01,
        finalists=3,
        final_rounds=3,
    ),
}
