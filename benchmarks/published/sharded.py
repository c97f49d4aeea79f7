"""How a published row was spread over several devices, by what it says and what its project's code decides.

fms-acceleration: torch's first FSDP through accelerate 1.0, `TRANSFORMER_BASED_WRAP`, frozen weights kept as loaded,
trained ones in fp32 under autocast (`Accelerator.prepare_model`). fsdp_qlora: the same FSDP in bf16 throughout, packed
weights stored as bf16 so that they are sharded too (`train.py`). Tables of the DeepSpeed autotuner: ZeRO by stage.
"""

from __future__ import annotations

import re
from typing import Any

from autotune.cost.sharding import Spread
from autotune.values.config import Parallelism, Sharding
from published.rows import NotPredicted, Row

ALONE = Spread(Parallelism(), mixed=False)

# What a row's `distributed` begins with.
_SHARDINGS: tuple[tuple[str, Sharding], ...] = (
    ("FSDP FULL_SHARD", "fsdp_full"),
    ("FSDP NO_SHARD", "none"),
    ("baseline vanilla HF DDP", "none"),
)
_ZERO = re.compile(r"ZeRO-(\d)")
_STAGES: dict[str, Sharding] = {"0": "none", "1": "zero_1", "2": "zero_2", "3": "zero_3"}


def spread_of(row: Row, *, mixed: bool) -> Spread:
    """Return how a row was spread.

    Args:
        row: It.
        mixed: Whether arithmetic was in 16 bits beside weights in fp32, or would be.

    Raises:
        NotPredicted: It can't be told, or isn't predicted.
    """
    if row.n_gpus == 1:
        return ALONE
    offload: dict[str, Any] = {}
    if row.offload not in ("", "none"):
        if row.offload != "CPU params":
            raise NotPredicted("offloaded to the host: " + row.offload)
        offload = {"offload": "parameters"}
    sharding = _sharding(row)
    return Spread(
        Parallelism(world_size=row.n_gpus or 1, sharding=sharding, **offload),
        mixed=mixed,
        frozen_in_fp32=False,
        root_stays=sharding == "fsdp_full",
    )


def _sharding(row: Row) -> Sharding:
    for beginning, sharding in _SHARDINGS:
        if row.distributed.startswith(beginning):
            return sharding
    stage = _ZERO.search(row.distributed)
    if row.group == "deepspeed_autotune" and stage is not None:
        return _STAGES[stage.group(1)]
    raise NotPredicted("spread in a way that isn't modelled: " + (row.distributed or "not stated"))


def holds_inputs(row: Row, *, frozen: bool) -> bool:
    """Return whether torch's first FSDP held the inputs of layers, and their gradients, until the backward pass ended.

    Of a unit without trained weights it registers `register_multi_grad_hook` on the inputs, which refer to the hook,
    and the hook to them; under reentrant checkpointing these are leaves, whose gradients stay with them
    (`_register_post_backward_reshard_only_hook`, removed in `_finalize_params`).
    """
    return frozen and (row.n_gpus or 0) > 1 and row.group == "fms_acceleration"
