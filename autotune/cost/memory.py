"""Memory of a configuration, by component, from its family's trace. Pure arithmetic.

A training has phases, of which the largest is its peak. A step's forward and backward hold weights, optimizer states
and the tensors made so far, with accumulation the gradients of the micro-step before too; the optimizer's step holds
all gradients and its temporaries. Evaluation and saving come when gradients are gone. `sharding` knows the share of one
of several devices. Outside of the allocator come the CUDA context, or on a CPU the process itself, and NCCL's buffers.

The storages that are alive are summed up once for each operator, and the moments kept that are the peak at some
micro-batch, so that a search can ask for thousands of configurations. For one the allocator is replayed (`reserve`).
"""

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.cost.family import workspace_bytes
from autotune.cost.optimizers import optimizer
from autotune.cost.profile import LAYER_NUMBER, REFERENCE, Profile, Storages, Vector, total_bytes
from autotune.cost.reserve import Held, held_bytes
from autotune.cost.sharding import NCCL_BYTES, WAYS, Share, Spread, buckets_of, share_of
from autotune.values.config import Parallelism, Precision, TrainConfig
from autotune.values.estimate import COMPONENTS, Evaluation, PhaseName
from autotune.values.hardware import Hardware
from autotune.values.trial import Alive

_MIB = float(1 << 20)

# Micro-batches that peaks are looked for at.
_SAMPLES = np.unique(np.round(np.geomspace(1, 65536, 200)))

# The CUDA context and the kernels: 0.47 GiB when they are loaded as they are used, 0.92 GiB when all are (A100, torch
# 2.1 with CUDA 12.1, https://github.com/stas00/ml-engineering). A training run loads nearly all; of published runs
# nvidia-smi showed 0.2 to 1.9 GiB more beyond the reserved memory.
_CUDA = (0.92 * 1024 * _MIB, 0.4 * 1024 * _MIB)


@dataclass(frozen=True)
class Components:
    """Bytes at the allocated peak of a phase, and where it is."""

    weights: float
    gradients: float
    optimizer_state: float
    activations: float
    temporaries: float
    paged: float  # beyond the allocator
    moment: str
    communication: float = 0.0  # gathered weights and messages
    phase: PhaseName = "forward and backward"

    @property
    def allocated(self) -> float:
        own = self.weights + self.gradients + self.optimizer_state + self.activations + self.temporaries
        return own + self.communication


def components(
    profile: Profile, share: Share, micro_batch: float, accumulation: float, generated: int | None = None
) -> Components:
    """Return the memory at the peak of a step, of generating for it too, without a replay.

    `micro_batch`: samples of full length; `generated`: completions at once, None those of a step.
    """
    generating = _generating(profile, share, generated or round(micro_batch * accumulation))
    return _largest([*_steps(profile, micro_batch, accumulation, share), *generating])


def _largest(found: Sequence[Components]) -> Components:
    """Return the components with the most allocated; of equals the last."""
    return max(reversed(found), key=lambda c: c.allocated)


def _steps(profile: Profile, micro_batch: float, accumulation: float, share: Share) -> list[Components]:
    """Return the two phases of a step, whose inputs are all on the device (`Trainer.get_batch_samples`)."""
    inputs = profile.inputs_bytes * micro_batch * accumulation
    highest = _peak(profile, profile.storages, share, micro_batch, later=False)
    if accumulation > 1:
        highest = _largest([_peak(profile, profile.storages, share, micro_batch, later=True), highest])
    stepping = replace(
        highest,
        gradients=0.0 if share.in_backward else share.gradients,
        activations=inputs,
        temporaries=0.0 if share.in_backward else share.stepping,
        communication=share.step_buffers,
        moment="optimizer step",
        phase="optimizer step",
    )
    return [replace(highest, activations=highest.activations + inputs), stepping]


def _peak(profile: Profile, storages: Storages, share: Share, samples: float, *, later: bool) -> Components:
    """Return the memory of a pass at its peak; `later`: an earlier micro-step's gradients are there."""
    adds = later and share.adds
    lines, in_forward, moments = _moments(storages, adds, every=share.message > 0)
    activations, temporaries, made, fresh = (lines[..., 0] + lines[..., 1] * samples).T
    activations, has_gradients = share.kept * activations, made > 0
    gradients = share.gradient_share * (fresh if adds else made) + (share.accumulated if later else 0.0)
    if share.in_backward:
        temporaries = temporaries + share.stepping * (gradients > 0)
        gradients = np.minimum(gradients, share.gradients)
    buffers = np.where(has_gradients, share.backward_buffers, share.loss_buffers)
    buffers = np.where(in_forward, share.forward_buffers, buffers)
    filled = np.minimum(share.message, made - fresh if adds else made)
    buffers = buffers + share.copies * filled - share.released * made
    at = int((activations + temporaries + gradients + buffers).argmax())
    kept, taken, made, moved = (float(part[at]) for part in (activations, temporaries, gradients, buffers))
    weights = share.weights + always_bytes(profile)
    return Components(weights, made, share.states, kept, taken, share.paged, moments[at], moved)


@functools.lru_cache(maxsize=1024)
def _moments(storages: Storages, later: bool, *, every: bool) -> tuple[Vector, NDArray[np.bool_], list[str]]:
    """Return a pass's peaks at any micro-batch, or `every` moment: as `alive` has it, if forward, and what runs."""
    found, moments = storages.alive, list[int]()
    # Of each pass, with all gradients or where some are dealt out. Within a pass buffers of several devices don't
    # count: they come and go, and a published training of LoRA by FSDP takes 2 % less than the most of both.
    for first, part in ((0, found[: storages.forward_end]), (storages.forward_end, found[storages.forward_end :])):
        activations, temporaries, gradients, fresh = part.transpose(1, 0, 2)
        for share in (1.0,) if later else (1.0, 0.5, 0.25, 0.0):
            constant, slope = (activations + temporaries + share * (fresh if later else gradients)).T
            order = np.lexsort((-constant, -slope))  # of these no line exceeds one in both constant and slope:
            before = np.concatenate([[-np.inf], np.maximum.accumulate(constant[order])[:-1]])
            order = order[constant[order] > before]
            if len(order):
                at = first + order[np.argmax(constant[order] + slope[order] * _SAMPLES[:, None], axis=1)]
                moments += at.tolist()
    highest = np.arange(len(found)) if every else np.unique(moments)
    made = [int(storages.rows[(storages.rows[:, 0] == at).argmax(), 6]) for at in highest] if storages.origins else []
    origins = [storages.origins[origin] for origin in made] or [("", "")] * len(highest)
    names = [f"{REFERENCE}: {name}" if module.startswith(REFERENCE) else name for module, name in origins]
    return found[highest], highest < storages.forward_end, names


def _generating(profile: Profile, share: Share, completions: int) -> list[Components]:
    """Return the phase in which so many completions are generated at once; none where nothing is.

    A layer's keys or values are joined to the new ones in a new tensor (`DynamicLayer.update` of transformers). Of the
    logits there are those of the model, a copy in fp32 and the probabilities (`_sample`).
    """
    how = profile.generation
    if how is None:
        return []
    found = []
    layers, all_tokens = sum(count for count, _ in how.caches), how.prompt + how.completion
    prompts = "prompts", how.prompt, how.prompt, how.cache_bytes * layers * how.prompt
    for moment, tokens, passed, cached in (prompts, ("last token", all_tokens, 1, how.cached_bytes(all_tokens))):
        one = _peak(profile, how.storages, share, completions * passed / how.length, later=False)
        joined = completions * how.cache_bytes / 2 * min(tokens, max((most for _, most in how.caches), default=0))
        taken = one.activations + one.temporaries + joined + 12.0 * completions * how.words
        cache = completions * cached
        found.append(Components(one.weights, 0.0, share.states, cache, taken, share.paged, moment, 0.0, "generation"))
    return [_largest(found)]


@functools.lru_cache(maxsize=1024)
def always_bytes(profile: Profile) -> float:
    """Return the memory that libraries take beside a training.

    Of a GPU's allocator: cuBLAS's workspaces, and each weight rounded up to a block of 512 bytes. On a CPU oneDNN's
    kernels for products of 16 bits, which stay once made: a tiny Qwen2-VL and Qwen2.5-VL kept 16.6 and 18.4 MiB more
    after a step in bf16 than after one in fp32, TRL's reward model of a tiny Llama 4.3 MiB: the middle.
    """
    if profile.family.device == "cpu":
        return 11 * _MIB if profile.family.half else 0.0
    sizes = ((g.count, g.nbytes) for g in profile.parameters)
    workspaces = len(profile.storages.workspaces) * workspace_bytes(profile.family.generation)  # forward, backward
    return workspaces + float(sum(count * (-size % 512) for count, size in sizes))


def framework_bytes(hardware: Hardware) -> tuple[float, float]:
    """Return the bytes that are taken outside of the allocator, and their standard deviation."""
    # Of the process on a CPU: the Trainer, oneDNN's primitives and scratchpads. A Llama of one layer of width 64, whose
    # training takes 1 MiB, grew by 7 to 20 MiB.
    return (15 * _MIB, 10 * _MIB) if hardware.is_cpu else _CUDA


def communicators_bytes(hardware: Hardware, parallelism: Parallelism) -> float:
    """Return the memory of NCCL's groups that a device is in: one for each direction in which a training is spread."""
    if hardware.is_cpu or parallelism.world_size == 1:
        return 0.0
    degrees = (parallelism.tensor_parallel, parallelism.sequence_parallel)
    return NCCL_BYTES * sum(degree > 1 for degree in (parallelism.sharding_ranks, parallelism.replicas, *degrees))


def states_bytes(parameters: int, config: TrainConfig, *, frozen: int = 0) -> float:
    """Return a lower bound of the memory of weights, gradients and optimizer states on one device, without a trace.

    It is the number of parameters, all but the `frozen` of them trained unless there is an adapter, times the bytes of
    each. Adapters and states that are paged or offloaded count nothing.
    """
    spread, row = config.parallelism, optimizer(config.optim)
    if spread.offload != "none":
        return 0.0
    width = 2.0 if config.precision is Precision.PURE_BF16 else 4.0
    each, trained = width if config.quantization is None else 0.5, 0.0  # in 4 bits, the fewest
    if config.adapter is not None and config.precision is not Precision.FP32 and spread.sharding.startswith("zero"):
        each = min(each, 2.0)  # DeepSpeed keeps fp32 copies of trained weights alone
    if config.adapter is None and config.quantization is None:
        trained += 0.0 if row.in_backward else width  # else all gradients are there at once
        if not (row.paged or row.projection) and row.temporaries != "adafactor":
            trained += row.states * (row.width or width)
    total = parameters * each + (parameters - frozen) * trained
    return total / (spread.tensor_parallel if spread.sharding == "none" else spread.world_size)


_WRAPPERS = re.compile(r"^(base_model\.model\.)|(\.base_layer|\.default)(?=\.|$)")


class _Tensor(NamedTuple):
    kind: str
    module: str
    operator: str
    nbytes: float
    is_fixed: bool = True  # whatever the micro-batch


@dataclass(frozen=True)
class Footprint:
    """The memory of a configuration of a traced family."""

    config: TrainConfig
    profile: Profile
    micro_batch: float  # samples of full length
    accumulation: float

    @property
    def share(self) -> Share:
        spread, kept = Spread.of(self.config), self.config.activation_memory_budget
        found = share_of(self.profile, self.config.optim, spread, accumulated=self.accumulation > 1)
        return found if kept is None else replace(found, kept=kept)

    def stepping(self) -> Components:
        completions = self.config.generation_batch_size
        found = components(self.profile, self.share, self.micro_batch, self.accumulation, completions)
        return replace(found, temporaries=found.temporaries + self._kept_outputs)

    @property
    def _kept_outputs(self) -> float:
        """The bytes of a CUDA graph's outputs, logits mostly, which stay until the next replay (GPT-2, torch 2.11)."""
        profile = self.profile
        if not self.config.records_graphs or profile.family.device != "cuda" or profile.evaluation is None:
            return 0.0
        return profile.evaluation.outputs_bytes.at(self.micro_batch)

    def phases(self, evaluation: Evaluation | None) -> list[Components]:
        """Return the memory of each phase, those of a step first; evaluation is the Trainer's if it is None."""
        config, profile, share = self.config, self.profile, self.share
        steps = _steps(profile, self.micro_batch, self.accumulation, share)
        resting = Components(steps[0].weights, 0.0, share.states, 0.0, 0.0, share.paged, "state_dict", phase="saving")
        between = [resting]  # when gradients are gone
        if WAYS[config.parallelism.sharding].weights:  # saved one gathered parameter after the other: `get_state_dict`
            between = [replace(resting, communication=max((g.nbytes for g in profile.parameters), default=0.0))]
        if (forward := profile.evaluation) is not None:
            how = evaluation or Evaluation()
            before = max(0, how.kept_samples - how.batch) * forward.outputs_bytes.per_sample
            highest = _peak(profile, forward.storages, replace(share, kept=1.0), how.batch, later=False)
            evaluating = [replace(highest, activations=highest.activations + before, phase="evaluation")]
            if before:  # `EvalLoopContainer.add` of transformers makes a new tensor of those before and of this batch's
                whole = before + forward.outputs_bytes.at(how.batch)
                evaluating.append(replace(evaluating[0], activations=whole, temporaries=whole, moment="cat"))
            between.insert(0, _largest(evaluating))
        is_replayed = profile.family.device == "cuda" and config.activation_memory_budget is None
        is_whole = config.parallelism.is_single or buckets_of(config, profile.family) is not None
        if is_replayed and (is_whole or WAYS[config.parallelism.sharding].engine == "fsdp"):
            peaks, counted = self._held(evaluation), steps
            if not is_whole:  # beside shards blocks are larger than what was asked for by as much as on one device
                alone = share_of(profile, config.optim, Spread(Parallelism(), False), accumulated=self.accumulation > 1)
                counted = _steps(profile, self.micro_batch, self.accumulation, alone)
            inputs = profile.inputs_bytes * self.micro_batch * self.accumulation + profile.buffers_bytes
            more = [peak + inputs - c.allocated for c, peak in zip(counted, peaks[:2], strict=True)]
            steps = [replace(c, temporaries=c.temporaries + size) for c, size in zip(steps, more, strict=True)]
            if is_whole and peaks.evaluation:
                size = peaks.evaluation + profile.buffers_bytes - between[0].allocated
                between[0] = replace(between[0], temporaries=between[0].temporaries + size)
        steps[0] = replace(steps[0], temporaries=steps[0].temporaries + self._kept_outputs)
        completions = config.generation_batch_size or round(self.micro_batch * self.accumulation)
        return [*steps, *_generating(profile, share, completions), *between]

    def _held(self, evaluation: Evaluation | None) -> Held:
        return held_bytes(
            self.profile, self.config.optim, self.micro_batch, accumulated=self.accumulation > 1,
            expandable=self.config.expandable_segments, buckets=buckets_of(self.config, self.profile.family),
            evaluation=evaluation,
        )  # fmt: skip

    def peak(self, evaluation: Evaluation | None) -> tuple[Components, float]:
        """Return memory by component and what the allocator reserves beyond it, evaluation left out if it is None."""
        found, profile = self.phases(evaluation), self.profile
        peak = _largest([c for c in found if evaluation is not None or c.phase not in ("evaluation", "saving")])
        if profile.family.device == "cpu":  # its allocator holds nothing
            return peak, 0.0
        unused = float(self._held(evaluation).unused)
        if WAYS[self.config.parallelism.sharding].engine == "fsdp":
            # FSDP2 holds more on streams of its own, whose blocks the computing's can't use: gathered units as they
            # arrive, and reduced gradients, also after they have been freed (`_fsdp_collectives.py` of torch).
            there = 0.0 if self.accumulation > 1 and peak.phase == "forward and backward" else peak.gradients
            unused += max(0.0, self.share.gradients - there) + total_bytes(profile.outside) + total_bytes(profile.layer)
        return peak, unused

    def alive(self, peak: Components) -> tuple[Alive, ...]:
        """Return the tensors that are alive at a peak, the largest first; on several devices in proportion."""
        totals: dict[str, float] = {name: getattr(peak, field) for name, field in COMPONENTS.items()}
        sums: dict[str, float] = defaultdict(float)
        groups: dict[tuple[str, str, str], list[_Tensor]] = defaultdict(list)
        for tensor in self._tensors(peak.phase):
            sums[tensor.kind] += tensor.nbytes
            if totals[tensor.kind] and tensor.nbytes:  # layers alike together, as the model names them
                module = LAYER_NUMBER.sub(".*", _WRAPPERS.sub("", tensor.module))
                groups[tensor.kind, module, tensor.operator].append(tensor)
        rows = []
        rest = {kind: total for kind, total in totals.items() if total > 0}
        for (kind, module, operator), tensors in groups.items():
            nbytes = sum(t.nbytes for t in tensors) * min(1.0, totals[kind] / sums[kind])
            if nbytes >= 0.002 * peak.allocated:  # smaller ones are put together by kind
                rest[kind] -= nbytes
                knob = _knob(self.config, kind, module, operator, is_fixed=all(t.is_fixed for t in tensors))
                rows.append((kind, module, operator, len(tensors), nbytes, knob))
        rows += [(kind, "", "others", 0, nbytes, None) for kind, nbytes in rest.items() if nbytes >= 0.5]
        found = (
            Alive(kind=kind, module=module, operator=operator, tensors=count, allocated_bytes=round(nbytes), knob=knob)
            for kind, module, operator, count, nbytes, knob in rows
        )
        return tuple(sorted(found, key=lambda row: -row.allocated_bytes))

    def _tensors(self, phase: PhaseName) -> Iterator[_Tensor]:
        profile, optim, accumulated = self.profile, self.config.optim, self.accumulation > 1
        parameters = [(name.rpartition(".")[0], group) for name, group in zip(profile.names, profile.made, strict=True)]
        for module, group in parameters:
            yield _Tensor("weights", module, "parameter", group.nbytes)
            if group.trained:
                yield _Tensor("optimizer states", module, optim, sum(optimizer(optim).state_sizes(group)[0]))
        if phase == "forward and backward":  # what the operators made
            storages = profile.storages
            activations, temporaries, gradients, fresh = storages.alive.transpose(1, 0, 2)
            lines = activations + temporaries + (fresh if accumulated else gradients)
            peak = (lines @ [1.0, self.micro_batch]).argmax()
            for made, freed, fixed, of_sample, is_gradient, columns, origin in storages.rows.tolist():
                if columns or made > peak or (freed <= peak and (accumulated or not is_gradient)):
                    continue
                is_saved = made < storages.forward_end < freed
                kind = "gradients" if is_gradient else "activations" if is_saved else "temporaries"
                module, operator = storages.origins[int(origin)] if storages.origins else ("", "")
                yield _Tensor(kind, module, operator, fixed + of_sample * self.micro_batch, is_fixed=not of_sample)
        if phase == "optimizer step" or (accumulated and phase not in ("evaluation", "saving")):
            for module, group in parameters:
                if group.trained:
                    yield _Tensor("gradients", module, "parameter", group.nbytes)


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
