"""Tapes of what tests compute, and the bytes that are alive, operator by operator."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from autotune.cost.profile import Storages
from autotune.cost.tape import Recorder, Tape


def tape_of(compute: Callable[[Recorder], torch.Tensor], *known: torch.Tensor, scratch: Callable | None = None) -> Tape:
    """The tape of a result, computed from known tensors, and of its backward pass."""
    recorder = Recorder(list(known), scratch)
    with recorder:
        result = compute(recorder)
        recorder.end_of_forward()
        result.backward(torch.empty_like(result) if result.ndim else None)
        del result
    return recorder.tape()


def live(tape: Tape) -> NDArray[np.float64]:
    """Bytes while each operator ran, a column each of ACTIVATION, TEMPORARY, GRADIENT and FRESH."""
    stored = Storages.of(np.insert(tape.storages, [3, 5], 0.0, axis=1), forward_end=tape.forward_end)
    taken = stored.alive[: len(tape.names), :, 0]
    return np.pad(taken, ((0, len(tape.names) - len(taken)), (0, 0)))
