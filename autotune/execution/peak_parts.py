"""Tells what a trial's peak memory on a CUDA device is made of, by phase and module, from the allocator's own record.

Torch records each block that it hands out or takes back, with a text that is set here to the module that runs forward.
Blocks that nobody's forward pass made are gradients, optimizer states, or temporaries of backward pass and optimizer.
"""

import re
import threading
from collections import Counter
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from autotune.execution.guard import MemoryGuard
from autotune.values.trial import Alive, Memory, PeakParts

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class PeakRecorder:
    """Records from now on, and learns where tensors lie from the modules that run and the optimizers that step."""

    def __init__(self, guard: MemoryGuard, *, of_loop: bool) -> None:
        self._guard, self._stack = guard, threading.local()
        self._of_loop, self._evaluates = of_loop, False  # a loop of the user's own, and whether it evaluates now
        self._models = WeakSet[nn.Module]()  # that no other module calls
        self._names: dict[int, str] = {}  # of modules
        self._kinds: dict[int, str] = {}  # of blocks, by their address
        self._steps = Counter[int]()  # of each optimizer
        self._peaks: dict[str, Memory] = {}
        torch.cuda.memory._record_memory_history("all", context=None)
        nn.modules.module.register_module_forward_pre_hook(self._entered)
        nn.modules.module.register_module_forward_hook(self._left, always_call=True)
        register_optimizer_step_pre_hook(self._stepping)
        register_optimizer_step_post_hook(self._stepped)

    def _entered(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or torch.cuda._is_in_bad_fork():  # of a graph; of a loader's worker
            return
        stack = self._stack.__dict__.setdefault("names", [])
        if not stack and module not in self._models:
            self._models.add(module)
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            self._names |= {id(each): _LAYER.sub("*", name) for name, each in inner.named_modules()}
            self._names |= {id(each): type(each).__name__ for each in (inner, module)}
        if not self._peaks and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            self.phase_ended("setting up")
        turns = self._evaluates == (module.training and torch.is_grad_enabled())
        if turns and self._of_loop and not stack and self._steps and any(p.requires_grad for p in module.parameters()):
            self.loop_turned()
            self._evaluates = not self._evaluates
        stack.append(self._names.get(id(module)) or (stack[-1] if stack else type(module).__name__))
        torch.cuda.memory._set_memory_metadata(stack[-1])

    def _left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or torch.cuda._is_in_bad_fork():
            return
        stack = self._stack.__dict__.setdefault("names", [])
        if stack:
            stack.pop()
        torch.cuda.memory._set_memory_metadata(stack[-1] if stack else "")

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        self._learn("gradients", [p.grad for group in optimizer.param_groups for p in group["params"]])

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        for model in self._models:
            self._learn("weights", [*model.parameters(), *model.buffers()])
        self._learn("optimizer states", tree_leaves(dict(optimizer.state)))
        self._guard.step_ended()  # before its peak is begun anew
        self._steps[id(optimizer)] += 1
        self.phase_ended("first step" if self._steps[id(optimizer)] == 1 else "later steps")

    def _learn(self, kind: str, tensors: list[Any]) -> None:
        for tensor in tensors:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(own, torch.Tensor) and own.is_cuda:
                self._kinds[own.untyped_storage().data_ptr()] = kind

    def has_made(self, steps: int) -> bool:
        return max(self._steps.values(), default=0) >= steps

    def loop_turned(self) -> None:
        self.phase_ended("evaluating" if self._evaluates else "later steps")

    def loop_saved(self) -> None:
        if self._evaluates:
            self.loop_turned()
        self.phase_ended("saving")

    def phase_ended(self, name: str) -> None:
        now = self._guard.peak()
        self._peaks[name] = Memory.worst_of([self._peaks.get(name, now), now])
        self._guard.begin_anew(Memory())

    def parts(self) -> PeakParts:
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        left, end = _replayed(trace)
        there, _ = _replayed(trace[:end])
        sizes, counts = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for address, (size, module) in there.items():
            # Freed addresses are used again, so that a block made in a forward pass is no gradient.
            stays = left.get(address) == (size, module)  # as a library's workspace does
            kind = "activations" if module and not stays else self._kinds.get(address, "temporaries")
            kind = "communication" if module == DistributedDataParallel.__name__ else kind  # its buckets of gradients
            sizes[kind, module] += size
            counts[kind, module] += 1
        alive = (
            Alive(kind=kind, module=module, operator="", tensors=counts[kind, module], allocated_bytes=size, knob=None)
            for (kind, module), size in sizes.most_common()
        )
        return PeakParts(phases=dict(self._peaks), alive=tuple(alive))


def _replayed(trace: list[dict[str, Any]]) -> tuple[dict[int, tuple[int, str]], int]:
    """Return size and module of each block at the end, by its address, and how many entries led to the peak."""
    there: dict[int, tuple[int, str]] = {}
    allocated = most = end = 0
    for index, entry in enumerate(trace):
        if entry["action"] == "alloc":
            there[entry["addr"]] = entry["size"], entry.get("user_metadata", "")
            allocated += entry["size"]
        elif entry["action"] == "free_completed":
            allocated -= there.pop(entry["addr"], (0, ""))[0]
        if allocated > most:
            most, end = allocated, index + 1
    return there, end
