"""The memory of one of several devices, and how long it waits for others and the host beyond its computing. Pure.

Data-parallel ranks hold everything (DDP), or deal out optimizer states, gradients and weights among them: the stages of
ZeRO (arXiv:1910.02054) and FSDP (arXiv:2304.11277). Tensor parallelism is in the profile, of one device's part.

By the ring algorithms an all-gather or a reduce-scatter of S bytes over n ranks sends (n-1)/n S through each device's
link, an all-reduce twice that (nccl-tests' `doc/PERFORMANCE.md`). DDP sends 2 Psi a step and ZeRO 3 sends 3 Psi
(section 7 of the paper), ZeRO 1 and 2 3 Psi as well, since DeepSpeed all-reduces their gradients
(`use_multi_rank_bucket_allreduce` in `zero/stage_1_and_2.py`). Ranks are dealt out as by Megatron-LM: those of a
tensor-parallel group next to each other (arXiv:2104.04473, section 3). A group is as slow as its slowest link.

With offload a step also waits for the host: each rank moves 28 bytes of each parameter that it updates over the memory
bus (two states and the weights read and written, gradients read: ZeRO-Offload, arXiv:2101.06840), and none of it hides
behind computing. FSDP's offload is taken to do the same, with weights in fp32 that are sent up in each pass.

Sources: torch 2.13 (`fsdp/_fully_shard`, `c10d/reducer.cpp`), accelerate 1.15, transformers 5.23, DeepSpeed 0.19.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from autotune.cost.family import Family
from autotune.cost.optimizers import optimizer
from autotune.cost.profile import ParameterGroup, Profile, Vector, total_bytes
from autotune.cost.reserve import Buckets
from autotune.training.arguments import ZERO_BUCKET_ELEMENTS
from autotune.values.catalogue import gpu_of
from autotune.values.config import Parallelism, Precision, Sharding, TrainConfig
from autotune.values.estimate import Rates
from autotune.values.hardware import Hardware

# Share of a link that large collectives attain: 230 to 250 of the 300 GB/s of A100's NVLink 3 in all-reduces over 8
# (https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests), 376 of H100's 450
# (https://github.com/NVIDIA/nccl/issues/1264); of PCIe 35 to 45 of 63 (the first source).
NVLINK_SHARE, PCIE_SHARE, NETWORK_SHARE = 0.8, 0.6, 0.8

# A node's adapters where nothing is said: one of 200 Gb/s for each device, as in NVIDIA's DGX A100 (eight ConnectX-6,
# https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html). DGX H100 has twice that.
ADAPTER_GB_S = 25.0

# NCCL's buffers of a communicator: device memory fell from 2.00 to 1.28 GiB when it was destroyed (two ranks,
# https://github.com/stas00/ml-engineering, training/performance, torch-dist-mem-usage.py).
NCCL_BYTES = 0.72 * (1 << 30)


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
    """How a training is spread over devices, and the types of its weights."""

    parallelism: Parallelism
    mixed: bool  # whether arithmetic is in 16 bits and weights are kept in fp32
    frozen_in_fp32: bool = True  # whether, if so, frozen weights are kept in fp32 too
    root_stays: bool = False  # embeddings and head stay gathered through both passes, as by torch's first FSDP

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        return cls(config.parallelism, config.precision in (Precision.BF16, Precision.FP16))


@dataclass(frozen=True)
class Share:
    """Bytes that one device holds in addition to those that the tape has as alive."""

    weights: float  # all the time, buffers included
    states: float  # of the optimizer, master copies of weights included
    paged: float  # states beyond the allocator
    gradients: float  # at the optimizer's step
    gradient_share: float  # of the gradients that the tape has so far, the part that stays
    accumulated: float  # gradients that are there between the micro-batches of a step
    stepping: float  # temporaries of the optimizer's step
    forward_buffers: float = 0.0  # gathered weights and messages in the forward pass, the loss included
    loss_buffers: float = 0.0  # the same in the backward pass while there are no gradients yet
    backward_buffers: float = 0.0  # the same when there are
    step_buffers: float = 0.0  # the same at the optimizer's step
    adds: bool = True  # gradients of a micro-batch to those before it as they are made, not once they are reduced
    message: float = 0.0  # on a CPU: the most of the gradients that are put together as they are made, to be sent
    copies: int = 0  # of what there is of it, beside `backward_buffers`
    released: float = 0.0  # on a CPU: bytes of gathered weights that are given back for each byte of gradients
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
    states, paged = optimizer(optim).state_bytes(profile.parameters)
    gradients, at_once = float(profile.gradients_bytes), optimizer(optim).in_backward
    buckets = gradients if spread.parallelism.data_parallel > 1 else 0.0  # DDP's are a copy of all gradients
    if at_once:
        largest = max((g.nbytes for g in profile.parameters if g.trained), default=0.0)
        gradients = min(gradients, at_once * largest)
    return Share(
        weights=float(profile.weights_bytes),
        states=states,
        paged=paged,
        gradients=gradients,
        gradient_share=1.0,
        accumulated=0.0 if at_once else gradients,
        stepping=optimizer(optim).temporary_bytes(profile.parameters, profile.family.gpu),
        forward_buffers=buckets,
        loss_buffers=buckets,
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
    local = stepped(profile, spread)
    states, paged = optimizer(optim).state_bytes(local)
    gradients = total_bytes(local, trained=True)
    stepping = optimizer(optim).temporary_bytes(local, profile.family.gpu)
    # Whole weights that are there when the loss is computed, and in the backward pass of a layer. The unit of norm and
    # head, without an embedding table that isn't the head as well, is not given back after the forward pass, in which
    # there is also the message of the unit that came last; in the backward pass the next layer is fetched ahead. With a
    # table that is, the unit begins with the embeddings, whose inputs have no gradient, and stays to the end.
    layer, outside = total_bytes(profile.layer or profile.parameters), profile.outside
    tables = {group.elements for group in outside if group.embedding}
    has_head = any(group.elements in tables for group in outside if not group.embedding)
    last = tuple(group for group in outside if not group.embedding) if has_head else outside
    between = total_bytes(last)
    message = between if has_head else layer
    if not way.regathers:
        between = backward = total_bytes(profile.parameters)
    elif spread.root_stays:
        between, message, backward = total_bytes(outside) + layer, 0.0, total_bytes(outside) + 2 * layer
    else:
        backward = (0.0 if has_head else between) + 2 * layer
    # The backward pass holds the gradients of the layer it is in, and the message that the unit before is reduced by;
    # beside whole gradients of earlier micro-batches, to which a layer adds its own, the head's message is the most.
    of_layer = total_bytes(profile.layer or profile.parameters, trained=True)
    of_head = total_bytes(last, trained=True) if has_head else 0.0
    if spread.root_stays:  # its gradients are the last to be sent
        backward += 2 * of_layer
    else:
        backward += of_head if accumulated else of_layer + max(of_layer, of_head)
    found = Share(
        weights=total_bytes(local) + profile.buffers_bytes,
        states=states,
        paged=paged,
        gradients=gradients,
        # Until a step's last micro-batch nothing is reduced (`set_requires_gradient_sync(False)`): gradients are whole.
        gradient_share=1.0 if accumulated else gradients / max(1.0, float(profile.gradients_bytes)),
        accumulated=profile.gradients_bytes,
        stepping=stepping,
        forward_buffers=between + message,
        loss_buffers=between,
        backward_buffers=backward,
    )
    if spread.parallelism.offload == "none":
        return found
    host = found.weights - profile.buffers_bytes + states + gradients + stepping
    share = found.gradient_share if accumulated else 0.0
    here = float(profile.buffers_bytes)
    return replace(found, weights=here, states=0.0, gradients=0.0, stepping=0.0, host=host, gradient_share=share)


def _deepspeed(profile: Profile, optim: str, spread: Spread, way: Way) -> Share:
    ranks, gathers = spread.parallelism.sharding_ranks, way.weights
    width = profile.gradients_bytes / max(1, profile.trained_elements)
    (master,) = stepped(profile, spread)  # in addition to the 16-bit weights
    states, paged = optimizer(optim).state_bytes([master])
    partition = 4.0 * master.elements
    temporaries = optimizer(optim).temporary_bytes([master], profile.family.gpu)
    # Stages 1 and 2 have two messages, one that is filled while the other is sent (`overlap_comm`). On a CPU one takes
    # memory as it is filled; stages 2 and 3 send a copy (`cat`), of which gloo's reduce-scatter makes another.
    trained = max(1.0, float(profile.gradients_bytes))
    message = min(ZERO_BUCKET_ELEMENTS * width, trained) if profile.family.device == "cpu" else 0.0
    bucket = message or (1 if gathers else 2) * ZERO_BUCKET_ELEMENTS * width
    stays = bucket if gathers else 0.0  # stages 1 and 2 give theirs back when all is reduced
    whole, layer = total_bytes(profile.parameters), total_bytes(profile.layer or profile.parameters)
    elements = sum(g.count * g.elements for g in profile.parameters)
    # Stage 3 leaves a billion elements gathered at the most, by default (`max_live_parameters`).
    gathered = min(whole, max(2 * layer, 1e9 * whole / max(1, elements))) if gathers else 0
    # Stage 3 makes a place for a rank's gradients at the start (`grad_partitions_flat_buffer`). The others copy them at
    # the step, in 16 bits twice: into a flat tensor, and that to fp32.
    reduced = profile.gradients_bytes / ranks
    # Stage 2 keeps gradients until the message that they go into is sent.
    share = (0.0 if gathers or message else min(1.0, 1 / ranks + bucket / trained)) if way.gradients else 1.0
    updating = temporaries if gathers else max(reduced if width < 4 else 0.0, temporaries)
    found = Share(
        weights=whole / (ranks if gathers else 1) + profile.buffers_bytes,
        states=states + partition + (reduced if gathers else 0.0),
        paged=paged,
        gradients=0.0 if gathers else reduced,
        gradient_share=share,
        accumulated=0.0 if gathers else reduced if way.gradients else profile.gradients_bytes,
        stepping=partition + updating,
        forward_buffers=gathered + stays,
        loss_buffers=gathered + stays,
        backward_buffers=gathered + (stays if message else bucket),
        step_buffers=stays,
        adds=not way.gradients,
        message=message,
        copies=1 + way.gradients,
        released=gathered / trained if message else 0.0,
    )
    if spread.parallelism.offload == "none":
        return found
    # States, fp32 gradients and, if asked for, weights are in the host's memory: ZeRO-Offload (arXiv:2101.06840).
    here = 0.0 if spread.parallelism.offload == "parameters" else found.weights
    gone: dict[str, Any] = dict.fromkeys(("states", "gradients", "gradient_share", "accumulated", "stepping"), 0.0)
    return replace(found, weights=here, host=found.states + partition + found.weights - here, **gone)


def stepped(profile: Profile, spread: Spread) -> tuple[ParameterGroup, ...]:
    """Return the parameters that one device's optimizer updates, with the width that they have between steps.

    DeepSpeed has the trained weights of a rank in fp32, flat and in one piece. FSDP has the rows of each parameter that
    `torch.chunk` gives the first rank, which has the most; packed weights stay packed.
    """
    way, ranks = WAYS[spread.parallelism.sharding], spread.parallelism.sharding_ranks
    if way.engine == "deepspeed":
        elements = math.ceil(profile.trained_elements / ranks)
        return (ParameterGroup(shape=(elements,), element_bytes=4.0, trained=True, count=1),)
    found = []
    for group in profile.parameters:
        wide = spread.mixed and (group.trained or spread.frozen_in_fp32) and group.element_bytes >= 2
        rows = [math.ceil(n / ranks) if way.states else n for n in group.shape[:1]]
        changes = {"element_bytes": 4.0 if wide else group.element_bytes, "shape": (*rows, *group.shape[1:])}
        found.append(group.model_copy(update=changes))
    return tuple(found)


# Rate of gloo's all-gather between processes of a CPU, of that of its all-reduce: it passes one half of 84 MB in 84 ms,
# where the other passes all of it in 55 (two processes on two cores of an AMD EPYC, torch 2.13).
GLOO_GATHERS = 1 / 3


@dataclass(frozen=True)
class Network:
    """The nodes of a training."""

    devices_per_node: int
    link: float  # bytes/s that a device attains to the others of its node, one way
    node: float  # bytes/s that a node attains to the others, one way
    on_cpu: bool = False  # whether the devices are processes of one CPU

    def channel(self, members: int, *, stride: int) -> tuple[float, float]:
        """Return bytes/s one way, and the least seconds, of `members` ranks whose numbers are `stride` apart."""
        if self.on_cpu:
            return self.link if members * stride <= self.devices_per_node else self.node, 200e-6
        # Seconds that a collective takes at the least: 14 hops of some 3 us over 8 devices of a node, and over 4 nodes
        # 68 us (32 KiB at 0.48 GB/s, https://github.com/stas00/ml-engineering/tree/master/network/benchmarks).
        if members * stride <= self.devices_per_node:
            return self.link, 30e-6
        # A ring over several nodes leaves each of them once, and so do those of the ranks between: a group has the
        # share of the node's adapters that it has of its devices.
        inside = max(1, min(members, self.devices_per_node // stride))
        return min(self.link, self.node * inside / self.devices_per_node), 70e-6


def network_of(
    hardware: Hardware, world: int, *, nodes: int = 1, gb_s: float | None = None, host_bandwidth: float
) -> Network:
    """Return the network of `world` devices like `hardware` on `nodes` nodes; the link is that of the GPU table.

    `gb_s`: of a node's adapters together, one way; None: :data:`ADAPTER_GB_S` for each device. The hardware's measured
    figure goes before both. `host_bandwidth` in bytes/s is for a device whose link isn't known.
    """
    each, measured = max(1, -(-world // nodes)), hardware.network_gb_s
    if hardware.is_cpu:
        # Processes of one CPU exchange through gloo over the loopback device, with the cores that also compute: a fifth
        # of the bytes/s of copying memory is taken.
        link = host_bandwidth * 0.2
        return Network(each, link, link if measured is None else measured * 1e9, on_cpu=True)
    gpu = gpu_of(hardware.name)
    if gpu is None:
        link = host_bandwidth * PCIE_SHARE
    else:
        link = gpu.link.gb_s * 1e9 * (PCIE_SHARE if gpu.link.kind.startswith("PCIe") else NVLINK_SHARE)
    adapters = ADAPTER_GB_S * each if gb_s is None else gb_s
    return Network(each, link, (adapters * NETWORK_SHARE if measured is None else measured) * 1e9)


def exposed_seconds(
    profile: Profile, parallelism: Parallelism, network: Network, micro: Vector, samples: Vector, accumulation: Vector
) -> Vector:
    """Return the seconds of a step that communication adds; `micro`: seconds that each micro-batch computes."""
    backward = 2 + profile.family.recomputed  # twice the forward pass, and what is recomputed
    forward_s = micro / (1 + backward)
    way, ranks = WAYS[parallelism.sharding], parallelism.sharding_ranks
    # When it is sent, whether of trained weights alone, and how often its bytes pass through a device's link. FSDP and
    # ZeRO 1 reduce in the last micro-batch of a step only, ZeRO from stage 2 on in each. In stages 1 and 2 the weights
    # that each rank has updated are gathered after the step, while nothing is computed.
    exchanges = [("forward", False, 1)] * way.weights + [("backward", False, 1)] * way.regathers
    reduced = "backward" if way.engine == "deepspeed" and way.gradients else "last backward"
    exchanges += [(reduced, True, 1 if way.weights else 2)]
    exchanges += [("step", True, 1)] * (way.states and not way.weights)
    # Neighbours, of which a replica of FSDP's consists, and the ranks of other replicas with the same shard.
    near, far = (ranks, parallelism.tensor_parallel), (parallelism.replicas, ranks)
    groups = [(*exchange, *near, 1) for exchange in exchanges] if ranks > 1 else []
    groups += [("last backward", True, 2, *far, ranks)] if parallelism.replicas > 1 else []
    total = np.zeros_like(samples)
    if way.engine == "ddp" and ranks > 1 and profile.buffers_bytes and parallelism.ddp_broadcast_buffers is not False:
        bandwidth, latency_s = network.channel(ranks, stride=1)  # before a step's first forward pass, which waits
        total = total + profile.buffers_bytes / bandwidth + latency_s
    for when, trained, factor, members, stride, share in groups:
        bandwidth, latency_s = network.channel(members, stride=stride)
        if network.on_cpu and (not trained or when == "step"):
            bandwidth = min(bandwidth, network.link * GLOO_GATHERS)
        size = factor * total_bytes(profile.parameters, trained=trained) / share * (members - 1) / members
        messages = profile.layers + 2  # the embeddings, and norm and head
        if way.engine == "ddp":
            cap = parallelism.ddp_bucket_cap_mb or 25  # by default (`bucket_cap_mb`)
            messages = max(1, math.ceil(size / 2 / (cap << 20)))
        elif not way.weights:
            messages = max(1, math.ceil(size / (2 * ZERO_BUCKET_ELEMENTS)))
        seconds = size / bandwidth + messages * latency_s
        count = accumulation if when in ("forward", "backward") else 1.0
        if when == "step" or (network.on_cpu and way.engine != "ddp"):  # there DeepSpeed has no stream beside the first
            total = total + count * seconds
            continue
        # It goes on while the device computes (gloo has threads of its own), but for the first or last message. Where
        # weights are gathered again in a backward pass that also reduces, each has one half of it.
        behind, least = forward_s if when == "forward" else forward_s * backward, seconds / messages
        shared = 0.0 if when == "forward" or not way.regathers else count if when == reduced else 1.0
        total = total + (count - shared) * np.maximum(least, seconds - behind)
        total = total + shared * np.maximum(least, seconds - behind / 2)
    return total + accumulation * layer_seconds(profile, parallelism, network, samples)


def layer_seconds(profile: Profile, parallelism: Parallelism, network: Network, samples: Vector) -> Vector:
    """Return the seconds that a micro-batch waits for what its layers exchange, by ring; nothing hides it."""
    total = np.zeros_like(samples)
    passes = 2 + profile.family.recomputed
    ring, ulysses = parallelism.context_parallel, parallelism.sequence_parallel // parallelism.context_parallel
    # Devices, messages of a layer in all passes, and their bytes of a sample. Tensor parallelism reduces hidden states
    # twice in a forward pass, after attention and perceptron. By DeepSpeed-Ulysses each device sends all but its own
    # part of queries, keys, values and outputs (arXiv:2309.14509, section 3.2), of which all count as wide as queries.
    # In a ring it gathers the others' keys and values in each pass, and hands on their gradients in fp32 as often as
    # there are devices (`_templated_ring_attention_backward` of torch).
    tensor, hidden, keys = parallelism.tensor_parallel, profile.hidden_bytes, profile.keys_bytes
    for degree, count, each in (
        (tensor, 2 * passes, 2 * (tensor - 1) / tensor * hidden),
        (ulysses, 4 * passes, (ulysses - 1) / ulysses * hidden),
        (ring, passes, (ring - 1) * keys),
        (ring, ring, 2 * keys),
    ):
        if degree > 1:
            bandwidth, latency_s = network.channel(degree, stride=1)
            size = each * samples
            total = total + count * profile.layers * (size / bandwidth + latency_s)
    return total


def host_seconds(profile: Profile, spread: Spread, rates: Rates, devices_per_node: int) -> tuple[float, float]:
    """Return the seconds that offload adds to a step, and to each micro-batch; a node's devices share a host."""
    ranks, way = spread.parallelism.sharding_ranks, WAYS[spread.parallelism.sharding]
    # 28 bytes a parameter are moved. A node's memory: eight channels of DDR4-3200 have 204.8 GB/s, of which STREAM
    # reaches 79 % (https://github.com/aigatech/vpbenchmarking).
    per_step = profile.trained_elements / ranks * 28.0 * devices_per_node / 160e9
    # Gradients go down and updated weights come up again, as wide as they are computed with.
    per_step += 2 * total_bytes(profile.parameters, trained=True) / ranks / rates.host_bandwidth
    # FSDP sends its fp32 shard up and casts it there (`_fsdp_param.py` of torch), as often as weights are gathered.
    part = total_bytes(stepped(profile, spread)) if way.engine == "fsdp" else total_bytes(profile.parameters) / ranks
    weights = (1 + way.regathers) * part / rates.host_bandwidth
    return per_step, weights if spread.parallelism.offload == "parameters" else 0.0
