"""The trace of a family: storages and work as lines in the micro-batch, at the model's full depth.

Values only, without torch: a profile is made in one process (`profiler`) and used in another.

Layers, whose parameters are sharded, gathered and prefetched together, are found by the parameters' names: the first
number in a name counts them. FSDP2 through the Trainer makes a unit of each transformer layer, one of the input
embeddings, and one of the last norm and the head (accelerate's `fsdp2_prepare_model`).
"""

import base64
import functools
import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autotune.cost.family import Family
from autotune.value import Value

# Kinds of operators, for the time they take; a transfer moves bytes between the device and the host.
VIEW, CONTRACTION, NORMALISATION, ELEMENTWISE, TRANSFER, FUSED_ATTENTION = range(6)
PRODUCTS = (CONTRACTION, FUSED_ATTENTION)  # whose FLOP a model needs

# Contents of storages, weights left out. A fresh gradient has just been computed: where there was one before, it is
# added to that and ends.
ACTIVATION, TEMPORARY, GRADIENT, FRESH = range(4)

# The module of the tensors of a model that is evaluated beside the trained one.
REFERENCE = "reference"

Vector = NDArray[np.float64]

# Operators that make SDPA's masks, the last where a row is no multiple of 8 tokens.
_MASKING = ("bitwise_and", "zeros_like", "constant_pad_nd")

_LAYER = re.compile(r"^(.*?\.\d+)\.")
LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


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
        return math.prod(self.shape)

    @property
    def nbytes(self) -> float:
        """Of one of the parameters."""
        return self.elements * self.element_bytes


class Line(Value):
    """A quantity of a micro-batch: `constant + per_sample x samples`."""

    constant: float
    per_sample: float

    def at(self, samples: float) -> float:
        return self.constant + self.per_sample * samples


class Work(Value):
    """Equal operators of a micro-step."""

    kind: int = Field(description="VIEW, CONTRACTION, NORMALISATION, ELEMENTWISE, TRANSFER or FUSED_ATTENTION")
    width: int = Field(description="bytes of the numbers that it computes with: 4, 2, or 1 of fp8")
    flops: Line
    moved_bytes: Line
    count: int
    attends: bool = Field(default=False, description="its work grows with the square of the samples' length")
    call: str = Field(default="", description="how to run it, its sizes as lines: see `time.at`; empty: not known")


class Storages(Value):
    """Memory that the operators of a pass make and free, at the model's full depth.

    Rows are (operator that made it, operator before which it ends, constant bytes, bytes per sample, whether a
    gradient, columns, origin). A gradient's end is where it would be added to one that is there already. The scratch
    memory of a sum over the rows of a matrix has rows in place of bytes, and columns, which are 0 otherwise.
    """

    packed: str = Field(repr=False, description="the rows, see `of`")
    forward_end: int = Field(description="operators of the forward pass, the loss included")
    workspaces: tuple[int, ...] = Field(default=(), description="operators for which cuBLAS takes one that it keeps")
    origins: tuple[tuple[str, str], ...] = Field(default=(), repr=False, description="distinct (module, operator)")

    @classmethod
    def of(cls, rows: Vector, **fields: Any) -> Self:
        """Return the storages of so many rows: float64, column after column, compressed, in base64."""
        columns = np.ascontiguousarray(rows.T, dtype="<f8")
        return cls(packed=base64.b64encode(zlib.compress(columns.tobytes(), 1)).decode(), **fields)

    def __hash__(self) -> int:
        return hash(self.packed)  # which a string works out once

    @property
    def rows(self) -> Vector:
        return _unpacked(self.packed)

    @property
    def alive(self) -> Vector:
        """(operators, 4, 2): bytes of each of ACTIVATION, TEMPORARY, GRADIENT, FRESH, constant and per sample."""
        rows = self.rows[self.rows[:, 5] == 0]  # a sum's scratch is no line, see `reserve`
        made, freed, lines, is_gradient = rows[:, 0].astype(int), rows[:, 1].astype(int), rows[:, 2:4], rows[:, 4] > 0
        found = np.zeros((max(made.max(initial=0), freed.max(initial=0)) + 1, 4, 2))
        stays = (made < self.forward_end) & (freed > self.forward_end)
        kinds = np.where(is_gradient, FRESH, np.where(stays, ACTIVATION, TEMPORARY))
        np.add.at(found, (made, kinds), lines)
        np.subtract.at(found, (freed, kinds), lines)
        np.add.at(found[:, GRADIENT], made[is_gradient], lines[is_gradient])
        return found.cumsum(axis=0)

    def of_one_row(self, samples: float, length: int) -> Self:
        """Return those of so many samples of `length` tokens as one row, with masks of all pairs of its tokens."""
        rows = self.rows.copy()
        masking = np.isin(rows[:, 6], [at for at, (_, operator) in enumerate(self.origins) if operator in _MASKING])
        elements = rows[:, 3] / length**2  # a mask has 1, 2 or 4 bytes for each pair, a padded one a few more
        is_mask = masking & (rows[:, 2] == 0) & (elements >= 1) & (elements <= 4 * (1 + 16 / length))
        rows[is_mask, 3] *= samples
        return type(self).of(rows, **self.model_dump(exclude={"packed"}))


@functools.lru_cache(maxsize=16)
def _unpacked(packed: str) -> Vector:
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<f8").reshape(7, -1).T


class ForwardPass(Value):
    """The forward pass of an evaluation."""

    storages: Storages
    outputs_bytes: Line = Field(description="what an evaluation with metrics keeps of it: logits, mostly")
    inputs_bytes: float = Field(default=0.0, description="of a sample; 0 on a CPU")


class Completions(Value):
    """How completions of prompts are generated: one forward pass over the prompts, then one for each token."""

    prompt: int = Field(description="tokens")
    completion: int = Field(description="tokens, of which as many forward passes are run")
    length: int = Field(description="tokens of a sample that `work` and `storages` are of")
    work: tuple[Work, ...] = Field(description="of a forward pass")
    storages: Storages
    cache_bytes: float = Field(description="keys and values of a token in one layer")
    caches: tuple[tuple[int, int], ...] = Field(description="layers, and the tokens that each of them keeps at most")
    weights_bytes: int = Field(description="of the model that generates")
    words: int = Field(description="of the vocabulary")

    def cached_bytes(self, tokens: float) -> float:
        return self.cache_bytes * sum(layers * min(tokens, most) for layers, most in self.caches)


class Profile(Value):
    """All that the cost model knows of a family and an input shape."""

    family: Family
    parameters: tuple[ParameterGroup, ...]
    order: tuple[int, ...] = Field(repr=False, description="of each, as it is made, its position in `parameters`")
    names: tuple[str, ...] = Field(repr=False, description="of each; layers that repeat have one's")
    buffers_bytes: int
    storages: Storages = Field(description="of a micro-step")
    work: tuple[Work, ...]
    needed_flops: Line = Field(description="of the model's contractions, recomputation left out")
    layer: tuple[ParameterGroup, ...] = Field(default=(), description="the largest layer; empty: the model has none")
    outside: tuple[ParameterGroup, ...] = Field(default=(), description="in no layer: embeddings, last norm, head")
    layers: int = Field(default=1, description="how many there are")
    unlike: float = Field(default=0.0, description="share of operators in which layers differ")
    evaluation: ForwardPass | None = Field(default=None, description="None: it was not traced")
    generation: Completions | None = Field(default=None, description="of a recipe; None: nothing is generated")
    inputs_bytes: float = Field(default=0.0, description="of a sample's inputs on a CUDA device; 0 on a CPU")
    hidden_bytes: float = Field(default=0.0, description="of a sample's hidden states between layers; 0: not known")
    keys_bytes: float = Field(default=0.0, description="a sample's keys and values in a layer, which a ring passes on")

    def __hash__(self) -> int:
        return hash((self.family, self.storages))  # enough to tell them apart, and quick

    @property
    def weights_bytes(self) -> int:
        return int(total_bytes(self.parameters)) + self.buffers_bytes

    @property
    def made(self) -> list[ParameterGroup]:
        return [self.parameters[at] for at in self.order]

    def needed(self, samples: float, attended: float) -> float:
        """Return the FLOP that the model needs for a micro-batch; `attended`: by the work of attention."""
        work = self.work_arrays()
        flops = work["flops"][:, 1] * work["count"] * np.isin(work["kind"], PRODUCTS)
        share = flops[work["attends"] > 0].sum() / max(flops.sum(), 1.0)  # recomputing is taken to be as much of both
        return self.needed_flops.at(float((1 - share) * samples + share * attended))

    @property
    def gradients_bytes(self) -> int:
        return int(total_bytes(self.parameters, trained=True))

    @property
    def trained_elements(self) -> int:
        return sum(g.count * g.elements for g in self.parameters if g.trained)

    def work_arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return the columns of `work`, a row for each."""
        columns = ("kind", "width", "count", "attends")
        return {
            "flops": np.array([(w.flops.constant, w.flops.per_sample) for w in self.work]),
            "moved": np.array([(w.moved_bytes.constant, w.moved_bytes.per_sample) for w in self.work]),
            **{name: np.array([getattr(w, name) for w in self.work], dtype=float) for name in columns},
        }


def layers_of(
    names: Sequence[str], groups: Sequence[ParameterGroup]
) -> tuple[tuple[ParameterGroup, ...], tuple[ParameterGroup, ...], int]:
    """Return the parameters of a model's largest layer, those in no layer, and the number of layers."""
    by_layer: dict[str, list[ParameterGroup]] = {}
    outside: list[ParameterGroup] = []
    for name, group in zip(names, groups, strict=True):
        match = _LAYER.match(name)
        (by_layer.setdefault(match[1], []) if match else outside).append(group)
    largest = max(by_layer.values(), key=total_bytes, default=[])
    counted, rest = (
        tuple(group.model_copy(update={"count": count}) for group, count in Counter(found).items())
        for found in (largest, outside)
    )
    return counted, rest, len(by_layer)


def total_bytes(groups: Sequence[ParameterGroup], *, trained: bool = False) -> float:
    return sum(g.count * g.elements * g.element_bytes for g in groups if g.trained or not trained)
