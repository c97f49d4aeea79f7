"""A training of the user's own as it is traced: its module, its loss and its batches, with sizes and without values.

The Trainer that the user's code has made is copied. Modules and tensors that it holds, a teacher's too, become ones of
the meta device; the batches are those that its data loader makes. A value that is asked for ends the trace, unless it
is a number with a fraction, as is logged; so do cuDNN's recurrent layers, whose memory the meta device doesn't show.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map_only

from autotune.cost.family import Family
from autotune.cost.semantics import Semantics


class OwnTraining:
    """A copy of a Trainer on the meta device. `batch_of(samples)` returns a batch as its data loader makes it."""

    def __init__(self, trainer: Any, batch_of: Callable[[int], Any]) -> None:
        self._real, self._batch_of = trainer, batch_of
        self._inputs: dict[int, tuple[Any, Any]] = {}
        self._trainer, memo = copy.copy(trainer), dict[int, Any]()

        def parameter(real: nn.Parameter, _: object) -> nn.Parameter:
            return nn.Parameter(_empty(real).detach(), real.requires_grad)

        tensors = mock.patch.object(torch.Tensor, "__deepcopy__", _empty)
        with tensors, mock.patch.object(nn.Parameter, "__deepcopy__", parameter):
            for name, value in vars(trainer).items():
                if isinstance(value, nn.Module | torch.Tensor):
                    vars(self._trainer)[name] = copy.deepcopy(value, memo)
        self.model = self._trainer.accelerator.unwrap_model(self._trainer.model).train()
        self.tensors = [value for value in memo.values() if isinstance(value, torch.Tensor)]

    @property
    def beside_bytes(self) -> int:
        """Memory of all tensors beside those of the trained module, of a teacher for instance."""
        of_model = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        return sum(tensor.nbytes for tensor in self.tensors if id(tensor) not in of_model)

    def inputs(self, samples: int) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(self._given(samples)) if isinstance(leaf, torch.Tensor)]

    def _given(self, samples: int) -> tuple[Any, Any]:
        """Return a batch and the number of its labels, as the Trainer hands them to its loss."""
        if samples not in self._inputs:
            (batch,), labels = self._real.get_batch_samples(iter([self._batch_of(samples)]), 1, torch.device("cpu"))
            batch = dict(batch) if isinstance(batch, Mapping) else batch
            self._inputs[samples] = tree_map_only(torch.Tensor, _empty, (batch, labels))
        return self._inputs[samples]

    def loss(self, model: Any, samples: int, semantics: Semantics, family: Family) -> torch.Tensor:
        """Return the loss of a batch, as `Trainer.training_step` computes it with a model that accelerate has wrapped.

        Autocast holds inside of the model alone, whose outputs then become fp32; DDP may copy them.
        """
        forward, (batch, labels) = model.forward, self._given(samples)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with semantics.casting():
                output = forward(*args, **kwargs)
            output = output if family.autocast is None else convert_to_fp32(output)
            return tree_map_only(torch.Tensor, torch.clone, output) if family.clones_outputs else output

        with mock.patch.object(model, "forward", wrapped), _checkpointed_again(semantics):
            loss: torch.Tensor = self._trainer.compute_loss(model, copy.copy(batch), num_items_in_batch=labels)
        return loss


def _empty(tensor: torch.Tensor, memo: object = None) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _checkpointed_again(semantics: Semantics) -> Iterator[None]:
    """Have what the module checkpoints by itself run again as the device would run it."""
    original: Any = checkpoint._checkpoint_without_reentrant_generator

    def run(function: Any, keeps: bool, contexts: Any, check: str, *args: Any, **kwargs: Any) -> Any:
        return original(function, False, lambda: (contextlib.nullcontext(), semantics.again()), "none", *args, **kwargs)

    def refuse(*_: Any) -> None:
        raise NotImplementedError("it checkpoints with use_reentrant=True")

    with (
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", run),
        mock.patch.object(checkpoint.CheckpointFunction, "apply", refuse),
    ):
        yield
