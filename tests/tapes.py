"""Bytes that are alive, operator by operator, of a tape."""

import numpy as np
from numpy.typing import NDArray

from autotune.cost.profile import Storages
from autotune.cost.tape import Tape


def live(tape: Tape) -> NDArray[np.float64]:
    """Bytes while each operator ran, a column each of ACTIVATION, TEMPORARY, GRADIENT and FRESH."""
    stored = Storages.of(np.insert(tape.storages, [3, 5], 0.0, axis=1), forward_end=tape.forward_end)
    taken = stored.alive[: len(tape.names), :, 0]
    return np.pad(taken, ((0, len(tape.names) - len(taken)), (0, 0)))
