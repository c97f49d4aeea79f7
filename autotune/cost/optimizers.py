"""Memory that an optimizer holds between steps and takes during one, by the shapes of the weights that are trained.

A table: a row an optimizer of transformers' `OptimizerNames`. States are counted from the libraries' own code (torch
2.13, transformers 5.24, bitsandbytes 0.50, lomo-optim 0.1, galore-torch 1.0, apollo-torch 1.0, schedulefree 1.4,
torch-optimi 0.3, torchao 0.18, grokadamw 0.1); tests hold them against a real step of the packages that are installed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autotune.cost.family import Generation, sum_bytes
from autotune.cost.profile import ParameterGroup, total_bytes

# bitsandbytes and torchao: states of smaller parameters keep their full width; larger ones have a scale for each block.
_MIN_8BIT_ELEMENTS = 4096


@dataclass(frozen=True)
class Optimizer:
    """The cost of an optimizer."""

    states: int  # values stored for each element of a weight
    # Bytes of each: 0 as wide as the weight, 1 in 8 bits with scales, 0.5 in 4 bits, 4 in fp32 whatever the weight.
    width: float = 0
    torchao: bool = False  # bitsandbytes otherwise: embeddings and small weights have states in fp32
    # Of a step: none (fused kernels), copies of all weights (foreach on a GPU), or a few of the largest (a loop).
    temporaries: Literal["none", "foreach", "loop", "adafactor"] = "none"
    from_start: bool = False  # states are there before the first step
    paged: bool = False  # states live in memory that moves between host and device, beyond torch's allocator
    copies: int = 1  # of all weights, where foreach kernels run
    loop_copies: float = 2  # of a weight, where a loop runs over them, without those that the weight before still holds
    wide_copies: int = 0  # copies in fp32 that are added where the weight is in 16 bits
    # How the gradients of matrices get a low rank, that of the states: by random numbers, which are kept, or by
    # singular vectors, of which all are kept where the weight is in fp32 (the first ones are a view).
    projection: Literal["", "random", "singular"] = ""
    compensates: bool = False  # a weight in 16 bits has one state more, against losses by rounding
    # Gradients that are there at once where weights are updated in the backward pass: 1, or 2 where the next weight's
    # hook does it. 0: all are there, until the step.
    in_backward: int = 0
    passes: float = 1.0  # bytes that a step moves on a GPU, over a fused kernel's: each foreach operator goes over them
    kernels: int = 1  # operators a step runs for each weight where it loops over them
    # Time of a step on a CPU over that of a fused kernel that moves as many bytes: 21 M parameters on one thread took
    # 29 ms fused, 146 ms in a loop, 251 ms in bitsandbytes' 32 bits and 539 ms in its 8 bits.
    cpu_cost: float = 1.0

    def state_bytes(self, groups: Sequence[ParameterGroup]) -> tuple[int, int]:
        """Return the bytes of its states: those of torch's allocator, and those that are paged."""
        resident = paged = 0.0
        for group in (g for g in groups if g.trained):
            here, beyond = self.state_sizes(group)
            resident += group.count * sum(here)
            paged += group.count * sum(beyond)
        return int(resident), int(paged)

    def state_sizes(self, group: ParameterGroup) -> tuple[list[float], list[float]]:
        """Return the bytes of each tensor that is stored for one parameter: in torch's allocator, and paged."""
        kept = list[float]()
        if self.projection and len(group.shape) == 2 and not group.embedding:
            narrow, wide = sorted(group.shape)
            rank = min(128, narrow)  # by the Trainer's default
            is_view = self.projection == "singular" and group.element_bytes == 4
            kept = [group.element_bytes * narrow * (narrow if is_view else rank)]
            group = group.model_copy(update={"shape": (wide, rank)})
        elements = group.elements
        if self.temporaries == "adafactor":
            if len(group.shape) < 2:
                return [4.0 * elements], []
            return [*kept, 4.0 * (elements // group.shape[-1]), 4.0 * (elements // group.shape[-2])], []
        if self.width == 0:
            states = self.states + (self.compensates and group.element_bytes < 4)
            return [*kept, *[group.element_bytes * elements] * states], []
        block = 128 if self.width == 0.5 else 256
        fits = elements % block == 0 if self.torchao else not group.embedding
        width, scales = group.element_bytes if self.torchao else 4.0, list[float]()
        if self.width <= 1 and elements >= _MIN_8BIT_ELEMENTS and fits:
            width, scales = self.width, [4.0 * math.ceil(elements / block)] * self.states
        sizes = [*kept, *[width * elements] * self.states]
        # Scales aren't paged: `torch.zeros` in bitsandbytes' init_state.
        return (scales, sizes) if self.paged and elements >= 100_000 else (sizes + scales, [])

    def temporary_bytes(self, groups: Sequence[ParameterGroup], gpu: Generation | None) -> int:
        """Return the most memory that a step takes and gives back; `gpu`: None is a CPU."""
        trained, sizes = [g for g in groups if g.trained], [0.0]
        if self.temporaries == "foreach" and gpu is not None:
            # torch/optim/adamw.py, _multi_tensor_adamw: the list exp_avg_sq_sqrt; in adagrad.py numerator and std
            return int(self.copies * total_bytes(trained))
        for group in trained:
            if self.temporaries != "none":
                copies, width = self.copies_in_loop(group)
                held = group.count > 1 and not self.in_backward  # the last copy of the weight before
                sizes.append((copies + held) * width * group.elements)
                if gpu is not None and (scratch := self.mean_bytes(group, gpu)):
                    sizes.append((copies - 1) * width * group.elements + scratch)
            elif gpu is None and self.width:
                # On a CPU alone bitsandbytes' kernels take, in fp32, the scaled gradient, a square root, a quotient,
                # states that are in 8 bits and a weight that is in 16 (`bitsandbytes/backends/cpu/ops.py`).
                in_8_bits = self.width == 1 and not group.embedding and group.elements >= _MIN_8BIT_ELEMENTS
                copies = 3 + (self.states if in_8_bits else 0) + (group.element_bytes < 4)
                sizes.append(copies * 4.0 * group.elements)
        return int(max(sizes))

    def mean_bytes(self, group: ParameterGroup, gpu: Generation) -> int:
        """Return the scratch memory of a mean over the rows of a matrix, which Adafactor takes of squared gradients."""
        is_matrix = len(group.shape) == 2 and self.temporaries == "adafactor" and not self.projection
        return sum_bytes(group.shape[0], group.shape[1], gpu) if is_matrix else 0

    def copies_in_loop(self, group: ParameterGroup) -> tuple[int, float]:
        """Return how many copies of a parameter a loop takes for it, and the bytes of an element of each."""
        # `_single_tensor_adamw`: the square root of exp_avg_sq and that divided by the bias correction (RMSprop and
        # Adagrad have none). `Adafactor.step`: the squared gradient and that plus epsilon; 16-bit weights and gradients
        # as well.
        copies = round(self.loop_copies)
        if self.wide_copies and group.element_bytes < 4:
            return copies + self.wide_copies, 4.0
        return copies, group.element_bytes


_ADAMW = Optimizer(2, temporaries="foreach", passes=2.5, kernels=12, cpu_cost=5.0)
_FACTORED = Optimizer(0, width=4, temporaries="adafactor", wide_copies=2, passes=4.0, kernels=25, cpu_cost=6.0)
_APOLLO = Optimizer(2, temporaries="loop", projection="random", passes=2.5, kernels=12, cpu_cost=5.0)
# GaLore decomposes a gradient now and then: a copy of it, and two factors that are hardly smaller.
_GALORE = replace(_APOLLO, loop_copies=3, projection="singular")
_TORCHAO = Optimizer(2, width=1, torchao=True, temporaries="loop", passes=2.5, kernels=12, cpu_cost=5.0)

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch": _ADAMW,
    "adamw_torch_fused": Optimizer(2),
    "adafactor": _FACTORED,
    "adalomo": replace(_FACTORED, wide_copies=1, in_backward=2),
    "apollo_adamw": _APOLLO,
    "apollo_adamw_layerwise": replace(_APOLLO, in_backward=1),
    "galore_adamw": _GALORE,
    "galore_adamw_layerwise": replace(_GALORE, in_backward=1),
    "galore_adamw_8bit": replace(_GALORE, width=1),
    "galore_adamw_8bit_layerwise": replace(_GALORE, width=1, in_backward=1),
    "galore_adafactor": replace(_FACTORED, projection="singular", loop_copies=3),
    "sgd": Optimizer(0, passes=1.0, kernels=2, cpu_cost=2.0),
    "rmsprop": replace(_ADAMW, states=1, loop_copies=1),
    "adagrad": replace(_ADAMW, states=1, copies=2, loop_copies=1, from_start=True),
    "lomo": Optimizer(0, temporaries="loop", loop_copies=0, wide_copies=2, in_backward=2),
    "adamw_8bit": Optimizer(2, width=1, cpu_cost=32.0),
    "adamw_bnb_8bit": Optimizer(2, width=1, cpu_cost=32.0),
    "paged_adamw_8bit": Optimizer(2, width=1, paged=True, cpu_cost=32.0),
    "paged_adamw_32bit": Optimizer(2, width=4, paged=True, cpu_cost=8.7),
    "lion_8bit": Optimizer(1, width=1, cpu_cost=32.0),
    "lion_32bit": Optimizer(1, width=4, cpu_cost=8.7),
    "paged_lion_8bit": Optimizer(1, width=1, paged=True, cpu_cost=32.0),
    "paged_lion_32bit": Optimizer(1, width=4, paged=True, cpu_cost=8.7),
    "ademamix": Optimizer(3, width=4, cpu_cost=8.7),
    "ademamix_8bit": Optimizer(3, width=1, cpu_cost=32.0),
    "paged_ademamix_32bit": Optimizer(3, width=4, paged=True, cpu_cost=8.7),
    "paged_ademamix_8bit": Optimizer(3, width=1, paged=True, cpu_cost=32.0),
    "rmsprop_bnb": Optimizer(1, width=4, cpu_cost=8.7),
    "rmsprop_bnb_32bit": Optimizer(1, width=4, cpu_cost=8.7),
    "rmsprop_bnb_8bit": Optimizer(1, width=1, cpu_cost=32.0),
    "adamw_torch_8bit": _TORCHAO,
    "adamw_torch_4bit": replace(_TORCHAO, width=0.5),
    # On a GPU its states wait in host memory, copied there and back for each weight: counted as if they stayed.
    "grokadamw": Optimizer(3, temporaries="loop", passes=4.0, kernels=20, cpu_cost=8.0),
    "schedule_free_adamw": _ADAMW,
    "schedule_free_radam": replace(_ADAMW, temporaries="none"),
    "schedule_free_sgd": replace(_ADAMW, states=1, temporaries="none"),
    "stable_adamw": replace(_ADAMW, temporaries="none", compensates=True),
}


def optimizer(name: str) -> Optimizer:
    """Return the row of `name`: AdamW's for one that can run nowhere, until the rules refuse it."""
    return OPTIMIZERS.get(name, _ADAMW)
