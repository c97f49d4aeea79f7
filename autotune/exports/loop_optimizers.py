"""The optimizers that a plain loop makes by itself: class and arguments of each, as the Trainer makes them.

Read off `trainer_optimizer.py` of transformers 5.23; a test holds every row against what the Trainer makes. Those that
project gradients, step inside the backward pass or schedule themselves are more than a class with arguments: a loop
says so, and takes what stands for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from autotune.exports.winner import Winner


class LoopOptimizer(NamedTuple):
    """An optimizer in a loop."""

    module: str
    name: str
    arguments: dict[str, Any]  # without the parameters

    @property
    def is_8bit(self) -> bool:
        """Whether bitsandbytes keeps its states in 8 bits: those of embeddings are left in 32."""
        return self.arguments.get("optim_bits") == 8


# In place of what a loop can't make.
STAND_IN = "adamw_torch_fused"


def loop_optimizer(winner: Winner) -> LoopOptimizer | None:
    """Return the optimizer of a configuration; None if it is more than a class with arguments."""
    if winner.config.optim not in _ROWS or "optim_args" in winner.arguments:
        return None
    return made(winner.config.optim, winner.hyperparameter)


def made(name: str, of: Callable[[str], Any]) -> LoopOptimizer:
    """Return an optimizer of the table with the hyperparameters that `of` gives by their names in TrainingArguments."""
    module, class_name, takes, own = _ROWS[name]
    betas = (of("adam_beta1"), of("adam_beta2"))
    shared = {
        "adam": {"betas": betas, "eps": of("adam_epsilon")},
        "betas": {"betas": betas},
        "ademamix": {"betas": (*betas, 0.9999), "alpha": 5.0, "eps": of("adam_epsilon")},
        "": {},
    }
    return LoopOptimizer(module, class_name, {"lr": of("learning_rate"), **shared[takes], **own})


_Row = tuple[str, str, str, dict[str, Any]]


def _bitsandbytes(name: str, takes: str, bits: int, *, paged: bool | None = False) -> _Row:
    own: dict[str, Any] = {"optim_bits": bits} if paged is None else {"optim_bits": bits, "is_paged": paged}
    return ("bitsandbytes.optim", name, takes, own)


_TORCHAO = {"block_size": 256, "bf16_stochastic_round": False}

# Module and class, what of the hyperparameters it takes, and its own arguments.
_ROWS: dict[str, _Row] = {
    "adafactor": ("transformers", "Adafactor", "", {"scale_parameter": False, "relative_step": False}),
    "adagrad": ("torch.optim", "Adagrad", "", {}),
    "adamw_torch": ("torch.optim", "AdamW", "adam", {}),
    "adamw_torch_fused": ("torch.optim", "AdamW", "adam", {"fused": True}),
    "rmsprop": ("torch.optim", "RMSprop", "", {}),
    "sgd": ("torch.optim", "SGD", "", {}),
    "adamw_torch_4bit": ("torchao.optim", "AdamW4bit", "adam", _TORCHAO),
    "adamw_torch_8bit": ("torchao.optim", "AdamW8bit", "adam", _TORCHAO),
    "adamw_8bit": _bitsandbytes("AdamW", "adam", 8),
    "adamw_bnb_8bit": _bitsandbytes("AdamW", "adam", 8),
    "paged_adamw_32bit": _bitsandbytes("AdamW", "adam", 32, paged=True),
    "paged_adamw_8bit": _bitsandbytes("AdamW", "adam", 8, paged=True),
    "ademamix": _bitsandbytes("AdEMAMix", "ademamix", 32),
    "ademamix_8bit": _bitsandbytes("AdEMAMix", "ademamix", 8),
    "paged_ademamix_32bit": _bitsandbytes("AdEMAMix", "ademamix", 32, paged=True),
    "paged_ademamix_8bit": _bitsandbytes("AdEMAMix", "ademamix", 8, paged=True),
    "lion_32bit": _bitsandbytes("Lion", "betas", 32),
    "lion_8bit": _bitsandbytes("Lion", "betas", 8),
    "paged_lion_32bit": _bitsandbytes("Lion", "betas", 32, paged=True),
    "paged_lion_8bit": _bitsandbytes("Lion", "betas", 8, paged=True),
    "rmsprop_bnb": _bitsandbytes("RMSprop", "", 32, paged=None),
    "rmsprop_bnb_32bit": _bitsandbytes("RMSprop", "", 32, paged=None),
    "rmsprop_bnb_8bit": _bitsandbytes("RMSprop", "", 8, paged=None),
}

NAMES = tuple(_ROWS)
