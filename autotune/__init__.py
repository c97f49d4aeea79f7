"""autotune finds the fastest training configuration that fits the memory of a GPU.

::

    import autotune

    result = autotune.find(model="t5-3b")
    args = result.training_arguments("out")  # transformers.TrainingArguments
    result.save("best-config.json")

Importing this package loads neither torch nor transformers nor optuna.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from autotune.adapter_config import (
        BitfitAdapter,
        DoraAdapter,
        Ia3Adapter,
        LohaAdapter,
        LokrAdapter,
        LoraAdapter,
        PrefixAdapter,
        PromptAdapter,
        PTuningAdapter,
        RsloraAdapter,
        VeraAdapter,
    )
    from autotune.api import find, resume
    from autotune.budget import Budget, Effort
    from autotune.callback import AutotuneCallback
    from autotune.config import Allowance, Precision, TrainConfig, Workload
    from autotune.cost_estimate import CostEstimate
    from autotune.errors import AutotuneError
    from autotune.estimating import estimate
    from autotune.loss import normalize_loss
    from autotune.result import TuningResult, load

_HOMES = {
    "find": "api",
    "resume": "api",
    "Allowance": "config",
    "Budget": "budget",
    "Effort": "budget",
    **dict.fromkeys(
        (
            "BitfitAdapter",
            "DoraAdapter",
            "Ia3Adapter",
            "LohaAdapter",
            "LokrAdapter",
            "LoraAdapter",
            "PTuningAdapter",
            "PrefixAdapter",
            "PromptAdapter",
            "RsloraAdapter",
            "VeraAdapter",
        ),
        "adapter_config",
    ),
    "Precision": "config",
    "TrainConfig": "config",
    "Workload": "config",
    "AutotuneCallback": "callback",
    "AutotuneError": "errors",
    "CostEstimate": "cost_estimate",
    "estimate": "estimating",
    "normalize_loss": "loss",
    "TuningResult": "result",
    "load": "result",
}

__all__ = [
    "Allowance",
    "AutotuneCallback",
    "AutotuneError",
    "BitfitAdapter",
    "Budget",
    "CostEstimate",
    "DoraAdapter",
    "Effort",
    "Ia3Adapter",
    "LohaAdapter",
    "LokrAdapter",
    "LoraAdapter",
    "PTuningAdapter",
    "Precision",
    "PrefixAdapter",
    "PromptAdapter",
    "RsloraAdapter",
    "TrainConfig",
    "TuningResult",
    "VeraAdapter",
    "Workload",
    "estimate",
    "find",
    "load",
    "normalize_loss",
    "resume",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    return getattr(importlib.import_module(f"autotune.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
