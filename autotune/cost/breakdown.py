"""What is alive at the predicted peak, tensor by tensor, and the knob that would shrink each kind.

It follows from the trace, whose storages know the module and the operator that made them. What one of several devices
holds is in proportion; all together are the components' bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from autotune.cost.memory import Components
from autotune.cost.optimizers import is_paged, state_sizes
from autotune.cost.profile import ACTIVATION, FRESH, GRADIENT, TEMPORARY, Profile
from autotune.values.config import Precision, TrainConfig
from autotune.values.estimate import Alive

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_WRAPPERS = re.compile(r"^(base_model\.model\.)|(\.base_layer|\.default)(?=\.|$)")


class _Tensor(NamedTuple):
    """A tensor at the peak, or several of a kind."""

    kind: str
    module: str
    operator: str
    nbytes: float
    is_fixed: bool = False  # whatever the micro-batch


def alive(
    profile: Profile, config: TrainConfig, parts: Components, *, samples: float, accumulated: bool
) -> tuple[Alive, ...]:
    """Return what is alive at the peak, most first.

    Args:
        profile: Of the configuration's family.
        config: The configuration.
        parts: Memory at the peak, by component.
        samples: Of full length, in the largest micro-batch.
        accumulated: Whether a step has more than one micro-batch.
    """
    found = [*_parameters(profile, config), *_storages(profile, parts, samples, accumulated=accumulated)]
    totals = {
        "weights": parts.weights,
        "gradients": parts.gradients,
        "optimizer states": parts.optimizer_state,
        "activations": parts.activations,
        "temporaries": parts.temporaries,
        "communication": parts.communication,
    }
    sums: dict[str, float] = defaultdict(float)
    groups: dict[tuple[str, str, str], list[_Tensor]] = defaultdict(list)
    for tensor in found:
        sums[tensor.kind] += tensor.nbytes
        if totals[tensor.kind]:
            module = _NUMBER.sub(
                ".*", _WRAPPERS.sub("", tensor.module)
            )  # layers alike together, as the model names them
            groups[tensor.kind, module, tensor.operator].append(tensor)
    rows = []
    rest = {kind: total for kind, total in totals.items() if total > 0}
    for (kind, module, operator), tensors in groups.items():
        nbytes = sum(t.nbytes for t in tensors) * min(1.0, totals[kind] / sums[kind])
        if nbytes < 0.002 * parts.allocated:  # what takes less is put together by kind
            continue
        rest[kind] -= nbytes
        knob = _knob(config, kind, module, operator, is_fixed=all(t.is_fixed for t in tensors))
        row = Alive(
            kind=kind, module=module, operator=operator, tensors=len(tensors), allocated_bytes=round(nbytes), knob=knob
        )
        rows.append(row)
    others = [
        Alive(kind=kind, module="", operator="others", tensors=0, allocated_bytes=round(nbytes), knob=None)
        for kind, nbytes in rest.items()
        if nbytes >= 0.5
    ]
    return tuple(sorted([*rows, *others], key=lambda row: -row.allocated_bytes))


def _parameters(profile: Profile, config: TrainConfig) -> Iterator[_Tensor]:
    """Yield weights, and gradients and states of those that are trained."""
    for name, group in zip(profile.names, profile.made, strict=True):
        module = name.rpartition(".")[0]
        yield _Tensor("weights", module, "parameter", group.elements * group.element_bytes, is_fixed=True)
        if group.trained:
            sizes, scales = state_sizes(config.optim, group)
            nbytes = sum(scales) + (0.0 if is_paged(config.optim, group) else sum(sizes))
            yield _Tensor("optimizer states", module, config.optim, nbytes, is_fixed=True)


def _storages(profile: Profile, parts: Components, samples: float, *, accumulated: bool) -> Iterator[_Tensor]:
    """Yield what the operators made; between steps and in the optimizer's, the gradients alone."""
    storages = profile.storages
    if parts.phase == "forward and backward":
        kinds = [ACTIVATION, TEMPORARY, FRESH if accumulated else GRADIENT]
        peak = (storages.alive[:, kinds].sum(axis=1) @ [1.0, samples]).argmax()
        for made, freed, fixed, of_sample, is_gradient, columns, origin in storages.rows.tolist():
            if columns or made > peak or (freed <= peak and (accumulated or not is_gradient)):
                continue
            is_saved = made < storages.forward_end < freed
            kind = "gradients" if is_gradient else "activations" if is_saved else "temporaries"
            module, operator = storages.origins[int(origin)] if storages.origins else ("", "")
            yield _Tensor(kind, module, operator, fixed + of_sample * samples, is_fixed=not of_sample)
    if parts.phase in ("evaluation", "saving"):
        return
    if accumulated or parts.phase == "optimizer step":
        for name, group in zip(profile.names, profile.made, strict=True):
            if group.trained:
                nbytes = group.elements * group.element_bytes
                yield _Tensor("gradients", name.rpartition(".")[0], "parameter", nbytes, is_fixed=True)


def _knob(config: TrainConfig, kind: str, module: str, operator: str, *, is_fixed: bool) -> str | None:
    """Return the knob, as `--fix` takes it, that would shrink a kind of tensors, the one that changes least first."""
    trains_all = config.adapter is None
    if kind == "weights":
        if not trains_all and ".*" in module:  # bitsandbytes packs layers, but neither embeddings nor the head
            return "quantization=nf4" if config.quantization is None else None
        return "precision=pure_bf16" if config.precision is not Precision.PURE_BF16 else None
    if kind == "gradients":
        return "adapter" if trains_all else None
    if kind == "optimizer states":
        return None if not trains_all else "optim" if config.optim.startswith("adamw_torch") else "adapter"
    if "softmax" in operator and "log" not in operator and config.attn_implementation == "eager":
        return "attention"
    if is_fixed:  # weights that autocast has cast, or partial sums of gradients
        return "precision=pure_bf16" if kind == "activations" else None
    if kind == "activations" and config.checkpointing == "none" and ".*" in module:
        return "checkpointing"
    return "micro-batch" if config.per_device_train_batch_size > 1 else None
