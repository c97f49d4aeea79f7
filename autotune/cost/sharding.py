"""What one of several devices holds of weights, gradients and optimizer states, and what gathering them takes.

Data-parallel ranks either hold everything (DDP) or deal parts out among them: the optimizer's states, the gradients and
the weights, which are the three stages of ZeRO (arXiv:1910.02054) and what FSDP does (arXiv:2304.11277). What is dealt
out has to be gathered for a moment; how much at once depends on the library. Tensor parallelism is in the
profile already, whose model is one device's part. Bytes only; pure.

Sources: torch 2.13 (`fsdp/_fully_shard`, `csrc/distributed/c10d/reducer.cpp`), accelerate 1.15 (`fsdp2_prepare_model`),
transformers 5.23 (`Trainer._inner_training_loop`), DeepSpeed 0.19 (`zero/stage_1_and_2.py`, `zero/stage3.py`,
`zero/config.py`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotune.cost.family import Family
from autotune.cost.optimizers import optimizer, state_bytes, temporary_bytes
from autotune.cost.profile import ParameterGroup, Profile, total_bytes
from autotune.cost.reserve import Buckets
from autotune.training.arguments import ZERO_BUCKET_ELEMENTS
from autotune.values.config import Parallelism, Precision, Sharding, TrainConfig


@dataclass(frozen=True)
class Way:
    """Which parts are dealt out to the data-parallel ranks, and by whom."""

    engine: Literal["ddp", "fsdp", "deepspeed"]
    states: bool = False
    gradients: bool = False
    weights: bool = False
    regathers: bool = False  # gives gathered weights back after a layer's forward pass, and gathers them again


WAYS: dict[Sharding, Way] = {
    "none": Way("ddp"),
    "zero_1": Way("deepspeed", states=True),
    "zero_2": Way("deepspeed", states=True, gradients=True),
    "zero_3": Way("deepspeed", states=True, gradients=True, weights=True, regathers=True),
    "fsdp_grad_op": Way("fsdp", states=True, gradients=True, weights=True),
    "fsdp_full": Way("fsdp", states=True, gradients=True, weights=True, regathers=True),
}


@dataclass(frozen=True)
class Spread:
    """How a training is spread, as far as memory goes."""

    parallelism: Parallelism
    mixed: bool  # whether arithmetic is in 16 bits and weights are kept in fp32
    frozen_in_fp32: bool = True  # whether, if so, frozen weights are kept in fp32 too
    root_stays: bool = False  # embeddings and head stay gathered through both passes, as by torch's first FSDP

    @classmethod
    def of(cls, config: TrainConfig) -> Spread:
        """Return how a configuration is spread."""
        return cls(config.parallelism, config.precision in (Precision.BF16, Precision.FP16))


ONE_DEVICE = Spread(Parallelism(), mixed=False)


@dataclass(frozen=True)
class Share:
    """What one device holds, in bytes, in addition to what the tape says is alive."""

    weights: float  # all the time, buffers included
    states: float  # of the optimizer, master copies of weights included
    paged: float  # states beyond the allocator
    gradients: float  # at the optimizer's step
    gradient_share: float  # of the gradients that the tape has so far, the part that stays
    accumulated: float  # gradients that are there between the micro-batches of a step
    stepping: float  # temporaries of the optimizer's step
    forward_buffers: float = 0.0  # gathered weights and messages while there are no gradients yet
    backward_buffers: float = 0.0  # the same when there are
    step_buffers: float = 0.0  # the same at the optimizer's step
    kept: float = 1.0  # share of the activations that are stored
    in_backward: bool = False  # weights are updated in the backward pass, so gradients are few and steps are there
    host: float = 0.0  # of the host's memory


@functools.lru_cache(maxsize=4096)  # a search asks again and again
def share_of(profile: Profile, optim: str, spread: Spread, *, accumulated: bool) -> Share:
    """Return what one device holds; `accumulated`: a step has more than one micro-batch."""
    way = WAYS[spread.parallelism.sharding]
    if way.engine == "fsdp":
        return _fsdp(profile, optim, spread, way, accumulated=accumulated)
    if way.engine == "deepspeed":
        return _deepspeed(profile, optim, spread, way)
    states, paged = state_bytes(optim, profile.parameters)
    gradients, at_once = float(profile.gradients_bytes), optimizer(optim).in_backward
    buckets = gradients if spread.parallelism.data_parallel > 1 else 0.0  # DDP's are a copy of all gradients
    if at_once:
        largest = max((g.elements * g.element_bytes for g in profile.parameters if g.trained), default=0.0)
        gradients = min(gradients, at_once * largest)
    return Share(
        weights=float(profile.weights_bytes),
        states=states,
        paged=paged,
        gradients=gradients,
        gradient_share=1.0,
        accumulated=0.0 if at_once else gradients,
        stepping=temporary_bytes(optim, profile.parameters, on_cpu=profile.family.device == "cpu"),
        forward_buffers=buckets,
        backward_buffers=buckets,
        step_buffers=buckets,
        in_backward=at_once > 0,
    )


def buckets_of(config: TrainConfig, family: Family) -> Buckets | None:
    """Return how DDP groups gradients; None where there is none."""
    spread = config.parallelism
    if spread.sharding != "none" or spread.data_parallel == 1:
        return None
    given = spread.ddp_bucket_cap_mb
    first, others = (1, 25) if given is None else (given, given)
    return Buckets(first << 20, others << 20, rebuilt=not family.clones_outputs)


def _fsdp(profile: Profile, optim: str, spread: Spread, way: Way, *, accumulated: bool) -> Share:
    ranks = spread.parallelism.sharding_ranks
    local = [_slice(_as_stored(group, spread), ranks) for group in profile.parameters]
    states, paged = state_bytes(optim, local)
    gradients = total_bytes(local, trained=True)
    stepping = temporary_bytes(optim, local, on_cpu=profile.family.device == "cpu")
    # Whole weights that are there when the loss is computed, and in the backward pass of a layer.
    layer, outside = total_bytes(profile.layer or profile.parameters), total_bytes(profile.outside)
    if not way.regathers:
        forward = backward = total_bytes(profile.parameters)
    elif spread.root_stays:
        forward, backward = outside + layer, outside + 2 * layer
    else:
        # The unit of norm and head, without an embedding table that isn't the head as well, is not given back after
        # the forward pass; the next layer is fetched ahead.
        rest = [g for g in profile.outside if not g.embedding]
        tables = {g.elements for g in profile.outside if g.embedding}
        has_head = any(group.elements in tables for group in rest)
        forward, backward = (total_bytes(rest) if has_head else outside) + layer, 2 * layer
    # The backward pass holds the gradients of the layer it is in, and the message that the layer before is reduced by.
    backward += 2 * total_bytes(profile.layer or profile.parameters, trained=True)
    found = Share(
        weights=total_bytes(local) + profile.buffers_bytes,
        states=states,
        paged=paged,
        gradients=gradients,
        # Until the last micro-batch of a step nothing is reduced (`set_requires_gradient_sync(False)`): whole gradients
        # are there.
        gradient_share=1.0 if accumulated else gradients / max(1.0, float(profile.gradients_bytes)),
        accumulated=profile.gradients_bytes,
        stepping=stepping,
        forward_buffers=forward,
        backward_buffers=backward,
    )
    if spread.parallelism.offload == "none":
        return found
    host = found.weights - profile.buffers_bytes + states + gradients + stepping
    share = found.gradient_share if accumulated else 0.0
    here = float(profile.buffers_bytes)
    return replace(found, weights=here, states=0.0, gradients=0.0, stepping=0.0, host=host, gradient_share=share)


def _deepspeed(profile: Profile, optim: str, spread: Spread, way: Way) -> Share:
    parallelism, ranks = spread.parallelism, spread.parallelism.sharding_ranks
    trained = sum(g.count * g.elements for g in profile.parameters if g.trained)
    width = profile.gradients_bytes / trained if trained else 0.0
    master = _master(profile, ranks)  # in addition to the 16-bit weights
    states, paged = state_bytes(optim, [master])
    partition = 4.0 * master.elements
    stepping = temporary_bytes(optim, [master], on_cpu=profile.family.device == "cpu") + partition
    gathers = way.weights
    # In stages 1 and 2 there are two messages, one that is filled while the other is sent (`overlap_comm`).
    bucket = (1 if gathers else 2) * ZERO_BUCKET_ELEMENTS * width
    whole = total_bytes(profile.parameters)
    layer = total_bytes(profile.layer or profile.parameters)
    elements = sum(g.count * g.elements for g in profile.parameters)
    # What stage 3 leaves gathered at the most, by default: a billion elements (`max_live_parameters`).
    gathered = min(whole, max(2 * layer, 1e9 * whole / max(1, elements))) if gathers else 0
    gradients = profile.gradients_bytes / (ranks if way.gradients else 1)
    found = Share(
        weights=whole / (ranks if gathers else 1) + profile.buffers_bytes,
        states=states + partition,
        paged=paged,
        gradients=gradients,
        gradient_share=1 / ranks if way.gradients else 1.0,
        accumulated=gradients,
        stepping=stepping,
        forward_buffers=gathered + (bucket if gathers else 0.0),
        backward_buffers=gathered + bucket,
        step_buffers=bucket if gathers else 0.0,  # stages 1 and 2 give theirs back when all is reduced
    )
    if parallelism.offload == "none":
        return found
    # States, fp32 gradients and, if asked for, weights are in the host's memory: ZeRO-Offload (arXiv:2101.06840).
    here = 0.0 if parallelism.offload == "parameters" else found.weights
    gone: dict[str, Any] = dict.fromkeys(("states", "gradients", "gradient_share", "accumulated", "stepping"), 0.0)
    return replace(found, weights=here, host=found.states + partition + found.weights - here, **gone)


def stepped(profile: Profile, spread: Spread) -> tuple[ParameterGroup, ...]:
    """Return the parameters that one device's optimizer updates, with the width that they have between steps."""
    way, ranks = WAYS[spread.parallelism.sharding], spread.parallelism.sharding_ranks
    wide = tuple(_as_stored(group, spread) for group in profile.parameters)
    if not way.states:
        return wide
    if way.engine == "deepspeed":
        return (_master(profile, ranks),)
    return tuple(_slice(group, ranks) for group in wide)


def _master(profile: Profile, ranks: int) -> ParameterGroup:
    """Return the trained weights of a rank's partition in DeepSpeed: in fp32, flat and in one piece."""
    trained = sum(g.count * g.elements for g in profile.parameters if g.trained)
    return ParameterGroup(shape=(math.ceil(trained / ranks),), element_bytes=4.0, trained=True, count=1)


def _as_stored(group: ParameterGroup, spread: Spread) -> ParameterGroup:
    """Return a parameter with the width that it has between steps; what is packed stays so."""
    wide = spread.mixed and (group.trained or spread.frozen_in_fp32) and group.element_bytes >= 2
    return group.model_copy(update={"element_bytes": 4.0}) if wide else group


def _slice(group: ParameterGroup, ranks: int) -> ParameterGroup:
    """Return the first rank's rows of a parameter: `torch.chunk`, so that it has the most."""
    rows = [math.ceil(n / ranks) for n in group.shape[:1]]
    return group.model_copy(update={"shape": (*rows, *group.shape[1:])})
