"""Checks that what a configuration asked for really took effect in the Trainer.

Libraries have silent no-ops: fp16 on a CPU stays fp32, a kernel falls back, a flag is ignored by some models. A trial
in which a knob did nothing would be a wrong measurement, so it is refused with the reason. Called by the worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from autotune.config import Precision, TrainConfig

_OUTPUT_DTYPE = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
    Precision.PURE_BF16: torch.bfloat16,
}

# (class name, attribute that must hold) by optimizer; attributes are looked up in the first parameter group or in
# bitsandbytes' own arguments. An optimizer that isn't listed is checked by the Trainer's own name for it alone.
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw_torch": ("torch.optim.adamw.AdamW", {"fused": None}),
    "adamw_torch_fused": ("torch.optim.adamw.AdamW", {"fused": True}),
    "adafactor": ("transformers.optimization.Adafactor", {}),
    "adamw_bnb_8bit": ("bitsandbytes.optim.adamw.AdamW", {"optim_bits": 8}),
    "adamw_8bit": ("bitsandbytes.optim.adamw.AdamW", {"optim_bits": 8}),
    "paged_adamw_8bit": ("bitsandbytes.optim.adamw.AdamW", {"optim_bits": 8, "is_paged": True}),
    "paged_adamw_32bit": ("bitsandbytes.optim.adamw.AdamW", {"optim_bits": 32, "is_paged": True}),
    "sgd": ("torch.optim.sgd.SGD", {}),
}


class NoEffectError(Exception):
    """Something that was asked for did not happen; the message says what and what happened instead."""


class EffectsProbe(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Looks at the first training step from inside; leaves nothing behind that later steps would pay for."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._dtypes: set[torch.dtype] = set()
        self._checkpointed = 0
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch one layer and the checkpointed calls, for the first step alone."""
        self._seen = kwargs
        if self._config.torch_compile_backend is None:  # hooks would change what is compiled
            self._watch_dtype(kwargs["model"])
            self._watch_checkpointing(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks away."""
        while self._undo:
            self._undo.pop()()

    def _watch_dtype(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv1d) or type(module).__name__ == "Conv1D":
                handle = module.register_forward_hook(lambda _m, _i, output: self._dtypes.add(output.dtype))
                self._undo.append(handle.remove)
                return

    def _watch_checkpointing(self, model: nn.Module) -> None:
        for module in model.modules():
            original = getattr(module, "_gradient_checkpointing_func", None)
            if original is not None:
                module._gradient_checkpointing_func = self._counted(original)  # type: ignore[assignment]
                self._undo.append(lambda m=module, f=original: setattr(m, "_gradient_checkpointing_func", f))  # type: ignore[misc]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            self._checkpointed += 1
            return function(*args, **kwargs)

        return count

    def verify(self, trainer: Any, model: Any) -> dict[str, str]:
        """Return what was seen in effect, by knob.

        Raises:
            NoEffectError: Something asked for did not take effect.
        """
        return {
            "precision": self._precision(trainer, model),
            "tf32": _tf32(self._config),
            "optim": _optimizer(self._config, trainer.optimizer),
            "checkpointing": self._checkpointing(model),
            "attn_implementation": _attention(self._config, model),
            "torch_compile_backend": _compiled(self._config, trainer),
            "dataloader_num_workers": _workers(self._config, self._seen["train_dataloader"]),
            "adapter": _adapter(self._config, model),
        }

    def _precision(self, trainer: Any, model: nn.Module) -> str:
        wanted, asked = _OUTPUT_DTYPE[self._config.precision], self._config.precision
        if asked in (Precision.FP16, Precision.BF16) and not trainer.accelerator.native_amp:
            raise NoEffectError(f"{asked} was asked for, but autocast is off: the device's library ignores it")
        if self._dtypes and self._dtypes != {wanted}:
            raise NoEffectError(f"{asked} was asked for, but layers put out {_names(self._dtypes)}")
        weights = Counter(p.dtype for p in model.parameters() if p.is_floating_point())
        expected = torch.bfloat16 if asked is Precision.PURE_BF16 else torch.float32
        if weights and weights.most_common(1)[0][0] is not expected and self._config.adapter is None:
            raise NoEffectError(f"{asked} was asked for, but weights are {_names(weights)}")
        seen = (
            _names(self._dtypes) if self._dtypes else "autocast on" if trainer.accelerator.native_amp else "as weights"
        )
        return f"weights {_names(weights)}, layer outputs {seen}"

    def _checkpointing(self, model: nn.Module) -> str:
        flagged = sum(bool(getattr(m, "gradient_checkpointing", False)) for m in model.modules())
        if self._config.checkpointing == "none":
            if self._checkpointed or flagged:
                raise NoEffectError("no checkpointing was asked for, but the model checkpoints its activations")
            return "none"
        if not flagged:
            raise NoEffectError("checkpointing was asked for, but no layer of the model has it switched on")
        if self._config.torch_compile_backend is None and not self._checkpointed:
            raise NoEffectError("checkpointing was asked for and switched on, but no layer was checkpointed")
        return f"{self._checkpointed} checkpointed calls in the first step" if self._checkpointed else "switched on"


def _names(dtypes: Any) -> str:
    return "/".join(sorted(str(d).removeprefix("torch.") for d in dtypes))


def _tf32(config: TrainConfig) -> str:
    if not torch.cuda.is_available():
        return "none"
    actual = torch.backends.cuda.matmul.fp32_precision
    if (actual == "tf32") != config.tf32:
        raise NoEffectError(f"tf32 {config.tf32} was asked for, but matrix products in fp32 are {actual}")
    return str(actual)


def _optimizer(config: TrainConfig, optimizer: Any) -> str:
    inner = getattr(optimizer, "optimizer", optimizer)
    name = f"{type(inner).__module__}.{type(inner).__name__}"
    expected = _OPTIMIZERS.get(config.optim)
    if expected is None:
        return name
    if name != expected[0]:
        raise NoEffectError(f"optimizer {config.optim} was asked for, but {name} ran")
    own = getattr(inner, "args", None)
    for key, value in expected[1].items():
        actual = getattr(inner, key, getattr(own, key, inner.param_groups[0].get(key)))
        if actual != value and not (value is None and not actual):
            raise NoEffectError(f"optimizer {config.optim} was asked for, but {key} is {actual}")
    return name + "".join(f" {k}={v}" for k, v in expected[1].items())


def _attention(config: TrainConfig, model: Any) -> str:
    if config.attn_implementation is None:
        return "no attention"
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    actual = getattr(base.config, "_attn_implementation", None)
    if actual != config.attn_implementation:
        raise NoEffectError(f"attention {config.attn_implementation} was asked for, but {actual} ran")
    return str(actual)


def _compiled(config: TrainConfig, trainer: Any) -> str:
    wrapped = type(trainer.model_wrapped).__name__
    if config.torch_compile_backend is None:
        if wrapped == "OptimizedModule":
            raise NoEffectError("no compilation was asked for, but the model is compiled")
        return "none"
    from torch._dynamo.utils import counters

    graphs = counters["stats"].get("unique_graphs", 0)
    if wrapped != "OptimizedModule" or not graphs:
        raise NoEffectError(f"compile with {config.torch_compile_backend} was asked for, but no graph was compiled")
    breaks = sum(counters["graph_break"].values())
    return f"{config.torch_compile_backend}: {graphs} graphs, {breaks} graph breaks"


def _workers(config: TrainConfig, loader: Any) -> str:
    actual = getattr(loader, "num_workers", 0)
    if actual != config.dataloader_num_workers:
        raise NoEffectError(f"{config.dataloader_num_workers} data-loader workers were asked for, but {actual} ran")
    return str(actual)


def _adapter(config: TrainConfig, model: nn.Module) -> str:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name and p.requires_grad)
    if config.adapter is None:
        if adapters:
            raise NoEffectError(f"no adapter was asked for, but {adapters} parameters of adapters are trained")
        return f"none, {trained} parameters trained"
    kind = config.adapter.kind
    if not adapters and trained != total:
        raise NoEffectError(f"{kind} was asked for, but no adapter is trained")
    if trained == total:
        raise NoEffectError(f"{kind} was asked for, but {trained} of {total} parameters are trained")
    return f"{kind}, {trained} of {total} parameters trained"
