"""The closed form of a traced family: memory and work as lines in the micro-batch, at the model's full depth.

Values only, without torch: a profile is made in one process (`profiler`) and used in another.

Layers are found by the names of their parameters, for what is sharded, gathered and prefetched together: a layer
is what a name's first number counts. FSDP2 through the Trainer makes a unit of each transformer layer, one of the input
embeddings, and one of the last norm and the head (accelerate's `fsdp2_prepare_model`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autotune.cost.family import Family
from autotune.value import Value
from autotune.values.estimate import TracedBy

# Kinds of operators, for the time they take; a transfer moves bytes between the device and the host.
VIEW, CONTRACTION, NORMALISATION, ELEMENTWISE, TRANSFER, FUSED_ATTENTION = range(6)
PRODUCTS = (CONTRACTION, FUSED_ATTENTION)  # whose FLOP a model needs

_LAYER = re.compile(r"^(.*?\.\d+)\.")


class ParameterGroup(Value):
    """Parameters of one shape and kind."""

    shape: tuple[int, ...]
    element_bytes: float = Field(description="4 in fp32, 2 in 16 bits; less for quantized weights")
    trained: bool
    embedding: bool = Field(default=False, description="the table of an embedding, which 8-bit optimizers treat apart")
    adapter: bool = False
    count: int

    @property
    def elements(self) -> int:
        """Elements of one parameter."""
        return math.prod(self.shape)


class Line(Value):
    """A quantity of a micro-batch: `constant + per_sample x samples`."""

    constant: float
    per_sample: float

    def at(self, samples: float) -> float:
        """Return the quantity for a micro-batch of `samples`."""
        return self.constant + self.per_sample * samples


class MemoryPoint(Value):
    """What is alive at one moment of a micro-step in addition to weights and optimizer states, in bytes."""

    operator: str
    activations: Line
    temporaries: Line
    gradients: Line = Field(description="so far, when none was there before")
    fresh_gradients: Line = Field(description="of them, those that an earlier micro-step's would still be added to")


class Work(Value):
    """Equal operators of a micro-step."""

    kind: int = Field(description="VIEW, CONTRACTION, NORMALISATION, ELEMENTWISE, TRANSFER or FUSED_ATTENTION")
    half: bool = Field(description="computed in 16 bits")
    flops: Line
    moved_bytes: Line
    count: int
    attends: bool = Field(default=False, description="its work grows with the square of the samples' length")
    call: str = Field(default="", description="how to run it, its sizes as lines: see `operators.at`; empty: not known")


class Repeat(Value):
    """A layer of an excerpt that the full model has more often: (position, length) of its operators and parameters."""

    forward: tuple[int, int]
    backward: tuple[int, int]
    parameters: tuple[int, int]
    times: int = Field(description="more than in the excerpt")


class Excerpt(Value):
    """A micro-step of the model with few layers, storage by storage, for what the allocator makes of it.

    Storages are rows of (position made, position freed, constant bytes, bytes per sample, whether a gradient, 0); a
    gradient's position freed is where it would be added to one that is there already. The scratch memory of a sum over
    the rows of a matrix has rows in place of bytes, and the columns in place of the 0.
    """

    storages: tuple[tuple[int, int, float, float, bool, int], ...]
    parameters: tuple[ParameterGroup, ...] = Field(description="in the order they are made, each with count 1")
    repeats: tuple[Repeat, ...] = Field(
        default=(), description="a layer of each stack, in the order of the forward pass"
    )
    workspaces: tuple[int, ...] = Field(default=(), description="positions where libraries take theirs")
    origins: tuple[tuple[str, str], ...] = Field(default=(), description="distinct (module, operator) of storages")
    origin: tuple[int, ...] = Field(default=(), description="of each storage, its position in `origins`")
    names: tuple[str, ...] = Field(default=(), description="of the parameters")
    forward_end: int = Field(default=0, description="operators of the forward pass")


class ForwardPass(Value):
    """The forward pass of an evaluation."""

    peaks: tuple[MemoryPoint, ...] = Field(description="moments that can be its peak")
    outputs_bytes: Line = Field(description="what an evaluation with metrics keeps of it: logits, mostly")
    excerpt: Excerpt | None = Field(default=None, description="of a CUDA device; None: of a CPU")
    inputs_bytes: float = Field(default=0.0, description="of a sample; 0 on a CPU")


class Generation(Value):
    """How completions of prompts are generated: one forward pass over the prompts, then one for each token."""

    prompt: int = Field(description="tokens")
    completion: int = Field(description="tokens, of which as many forward passes are run")
    length: int = Field(description="tokens of a sample that `work` and `peaks` are of")
    work: tuple[Work, ...] = Field(description="of a forward pass")
    peaks: tuple[MemoryPoint, ...] = Field(description="moments that can be its peak")
    cache_bytes: float = Field(description="keys and values of a token, all layers")
    weights_bytes: int = Field(description="of the model that generates")
    layers: int
    words: int = Field(description="of the vocabulary")


class Profile(Value):
    """All that the cost model knows of a family and an input shape."""

    family: Family
    parameters: tuple[ParameterGroup, ...]
    buffers_bytes: int
    peaks_first: tuple[MemoryPoint, ...] = Field(
        description="moments that can be the peak of a step's first micro-step"
    )
    peaks_later: tuple[MemoryPoint, ...] = Field(description="the same where gradients are there already")
    work: tuple[Work, ...]
    excerpt: Excerpt
    needed_flops: Line = Field(description="of the model's contractions, recomputation left out")
    traced_by: TracedBy
    layer: tuple[ParameterGroup, ...] = Field(default=(), description="the largest layer; empty: the model has none")
    outside: tuple[ParameterGroup, ...] = Field(default=(), description="in no layer: embeddings, last norm, head")
    layers: int = Field(default=1, description="how many there are")
    attention: tuple[str, ...] = Field(default=(), description="kernels that fused attention takes on a CUDA device")
    evaluation: ForwardPass | None = Field(default=None, description="None: it was not traced")
    generation: Generation | None = Field(default=None, description="of a recipe; None: nothing is generated")
    inputs_bytes: float = Field(default=0.0, description="of a sample's inputs on a CUDA device; 0 on a CPU")
    hidden_bytes: float = Field(default=0.0, description="of a sample's hidden states between layers; 0: not known")

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights and buffers."""
        return int(sum(g.count * g.elements * g.element_bytes for g in self.parameters)) + self.buffers_bytes

    def needed(self, samples: float, attended: float) -> float:
        """Return the FLOP that the model needs for a micro-batch; `attended`: by the work of attention."""
        work = self.work_arrays()
        flops = work["flops"][:, 1] * work["count"] * np.isin(work["kind"], PRODUCTS)
        share = flops[work["attends"] > 0].sum() / max(flops.sum(), 1.0)  # recomputing is taken to be as much of both
        return self.needed_flops.at(float((1 - share) * samples + share * attended))

    @property
    def gradients_bytes(self) -> int:
        """Bytes of the gradients of all trained weights."""
        return int(sum(g.count * g.elements * g.element_bytes for g in self.parameters if g.trained))

    def work_arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return the columns of `work`, a row for each."""
        return {
            "kind": np.array([w.kind for w in self.work], dtype=float),
            "half": np.array([w.half for w in self.work], dtype=float),
            "flops": np.array([(w.flops.constant, w.flops.per_sample) for w in self.work]),
            "moved": np.array([(w.moved_bytes.constant, w.moved_bytes.per_sample) for w in self.work]),
            "count": np.array([w.count for w in self.work], dtype=float),
            "attends": np.array([w.attends for w in self.work], dtype=float),
        }


@dataclass(frozen=True)
class Layers:
    """The layers of a model.

    Attributes:
        largest: Parameters of the largest one.
        outside: Parameters that are in none.
        count: How many layers there are.
    """

    largest: tuple[ParameterGroup, ...]
    outside: tuple[ParameterGroup, ...]
    count: int


def layers_of(names: Sequence[str], groups: Sequence[ParameterGroup]) -> Layers:
    """Return the layers of a model's parameters, given in the same order as their names."""
    by_layer: dict[str, list[ParameterGroup]] = {}
    outside: list[ParameterGroup] = []
    for name, group in zip(names, groups, strict=True):
        match = _LAYER.match(name)
        (by_layer.setdefault(match[1], []) if match else outside).append(group)
    largest = max(by_layer.values(), key=total_bytes, default=[])
    return Layers(_counted(largest), _counted(outside), len(by_layer))


def total_bytes(groups: Sequence[ParameterGroup], *, trained: bool = False) -> float:
    """Return the bytes of parameters, or of those that are trained."""
    return sum(g.count * g.elements * g.element_bytes for g in groups if g.trained or not trained)


def _counted(groups: Sequence[ParameterGroup]) -> tuple[ParameterGroup, ...]:
    return tuple(group.model_copy(update={"count": count}) for group, count in Counter(groups).items())
