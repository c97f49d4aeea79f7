"""Tells what a trial's peak memory on a CUDA device is made of, by phase and module, from the allocator's own record.

Torch records each block that it hands out or takes back, with a text that is set here to the module that runs forward.
Blocks that nobody's forward pass made are gradients, optimizer states, or temporaries of backward pass and optimizer.
"""

import re
import threading
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

from autotune.execution.guard import MemoryGuard
from autotune.values.trial import Alive, Memory, PeakParts


class PeakRecorder(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Records from now on; the Trainer's callback, which learns where its tensors lie."""

    def __init__(self, guard: MemoryGuard) -> None:
        self._guard, self._stack = guard, threading.local()
        self._names: dict[int, str] = {}
        self._kinds: dict[int, str] = {}  # of blocks, by their address
        self._peaks: dict[str, Memory] = {}
        torch.cuda.memory._record_memory_history("all", context=None)

    def watch(self, trainer: Any, *, modules: bool) -> None:
        """Learn from a Trainer; `modules`: which module runs, too, which would have a compiled one compiled anew."""
        trainer.add_callback(self)
        if not modules:
            return
        layer = re.compile(r"(?<=\.)\d+(?=\.|$)")
        self._names = {id(module): layer.sub("*", name) for name, module in trainer.model.named_modules()}
        self._names[id(trainer.model)] = type(trainer.model).__name__
        nn.modules.module.register_module_forward_pre_hook(self._entered)
        nn.modules.module.register_module_forward_hook(self._left, always_call=True)

    def _entered(self, module: nn.Module, inputs: Any) -> None:
        stack = self._stack.__dict__.setdefault("names", [])
        stack.append(self._names.get(id(module)) or (stack[-1] if stack else type(module).__name__))
        torch.cuda.memory._set_memory_metadata(stack[-1])

    def _left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        stack = self._stack.__dict__.setdefault("names", [])
        if stack:
            stack.pop()
        torch.cuda.memory._set_memory_metadata(stack[-1] if stack else "")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._learn("gradients", [p.grad for p in model.parameters()])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phase_ended("setting up")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._learn("weights", [*kwargs["model"].parameters(), *kwargs["model"].buffers()])
        optimizer = kwargs["optimizer"]
        self._learn("optimizer states", tree_leaves(dict(getattr(optimizer, "optimizer", optimizer).state)))
        self.phase_ended("first step" if state.global_step == 1 else "later steps")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.phase_ended("saving")

    def _learn(self, kind: str, tensors: list[Any]) -> None:
        for tensor in tensors:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(own, torch.Tensor) and own.is_cuda:
                self._kinds[own.untyped_storage().data_ptr()] = kind

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
