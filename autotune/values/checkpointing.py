"""Kinds of activation checkpointing, and what each asks of transformers. Values only.

Checkpointing keeps a layer's inputs instead of what it computes, and computes it again in the backward pass
(arXiv:1604.06174).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Checkpointing = Literal["none", "full", "every-2nd", "every-4th", "offload", "reentrant"]


@dataclass(frozen=True)
class CheckpointingKind:
    """What a kind means.

    Attributes:
        every: Only every so manieth layer is checkpointed; the others keep what they compute.
        offload: Inputs of layers are held in pinned memory of the host.
        reentrant: The older implementation of torch, which runs a layer again as a whole.
        since: First transformers that can do it through `TrainingArguments`.
    """

    every: int = 1
    offload: bool = False
    reentrant: bool = False
    since: tuple[int, int] = (5, 17)


# transformers 5.23: `activation_checkpointing_enable` in modeling_utils.py takes every_n_layers and offload; before it
# there is no such argument.
KINDS: dict[str, CheckpointingKind] = {
    "full": CheckpointingKind(),
    "every-2nd": CheckpointingKind(every=2, since=(5, 23)),
    "every-4th": CheckpointingKind(every=4, since=(5, 23)),
    "offload": CheckpointingKind(offload=True, since=(5, 23)),
    "reentrant": CheckpointingKind(reentrant=True),
}
assert {"none", *KINDS} == set(get_args(Checkpointing))

# transformers 5.23 renamed gradient_checkpointing (kept as an alias until 6) to activation_checkpointing.
RENAMED = (5, 23)


def arguments(kind: Checkpointing, transformers: tuple[int, int]) -> dict[str, object]:
    """Return the TrainingArguments of a kind for a version of transformers."""
    name = "activation_checkpointing" if transformers >= RENAMED else "gradient_checkpointing"
    if kind == "none":
        return {name: False}
    row = KINDS[kind]
    options: dict[str, object] = {"use_reentrant": row.reentrant}
    if row.every > 1:
        options["every_n_layers"] = row.every
    if row.offload:
        options["offload"] = True
    return {name: True, f"{name}_kwargs": options}


# From what keeps the least on the device to what keeps the most.
_LIGHTEST_FIRST = (("offload",), ("full", "reentrant"), ("every-2nd",), ("every-4th",), ("none",))


def keeps_less(one: Checkpointing, other: Checkpointing) -> bool:
    """Return whether `one` surely keeps less on the device than `other`."""
    rank = {kind: i for i, kinds in enumerate(_LIGHTEST_FIRST) for kind in kinds}
    return rank[one] < rank[other]


def kind_of(options: dict[str, object]) -> Checkpointing:
    """Return the kind of a user's `activation_checkpointing_kwargs`.

    Raises:
        ValueError: No kind has these options.
    """
    known = {"use_reentrant", "every_n_layers", "offload"}
    wanted = (options.get("every_n_layers", 1), options.get("offload", False), options.get("use_reentrant", False))
    for name in get_args(Checkpointing)[1:]:
        row = KINDS[name]
        if (row.every, row.offload, row.reentrant) == wanted and options.keys() <= known:
            return name  # type: ignore[no-any-return]
    raise ValueError(f"checkpointing with {options} is none of {', '.join(KINDS)}")
