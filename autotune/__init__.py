"""autotune finds the fastest training configuration that fits the memory of a GPU.

::

    import autotune

    result = autotune.find(model="t5-3b")
    args = result.training_arguments("out")  # transformers.TrainingArguments
    result.save("best-config.json")

Importing this package loads neither torch nor transformers nor optuna. Editors read `__init__.pyi`, which
`docs/hooks/stub.py` makes of these names.
"""

import importlib
from typing import Any

from autotune.version import __version__ as __version__

__all__ = [
    "Allowance", "AutotuneCallback", "AutotuneError", "BitfitAdapter", "Budget", "CostEstimate", "DoraAdapter",
    "Effort", "Ia3Adapter", "LohaAdapter", "LokrAdapter", "LoraAdapter", "OwnKnob", "PTuningAdapter", "Precision",
    "PrefixAdapter", "PromptAdapter", "RsloraAdapter", "TrainConfig", "TuningResult", "VeraAdapter", "Workload",
    "estimate", "find", "load", "normalize_loss", "preview", "rehearse", "resume",
]  # fmt: skip

# The module of each public name.
_HOMES = {
    **dict.fromkeys(("find", "preview", "resume"), "api"),
    "Allowance": "values.config",
    **dict.fromkeys(("Budget", "Effort"), "values.budget"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Adapter")), "values.techniques"),
    **dict.fromkeys(("Precision", "TrainConfig"), "values.config"),
    **dict.fromkeys(("OwnKnob", "Workload"), "values.workload"),
    "AutotuneCallback": "integrations.callback",
    "AutotuneError": "errors",
    "rehearse": "rehearsal",
    "CostEstimate": "values.estimate",
    "estimate": "estimates.estimate",
    "normalize_loss": "training.loss",
    **dict.fromkeys(("TuningResult", "load"), "tuning_result"),
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    return getattr(importlib.import_module(f"autotune.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
