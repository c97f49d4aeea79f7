"""Measures what machines attain between them, by all-reduces among all devices of a training."""

import time
from pathlib import Path

from autotune.execution import environment
from autotune.value import read_value, write_text
from autotune.values.trial import TrialRequest

FILE = "network.txt"  # bytes/s that a machine attains to the others, one way

LIMIT_S = 120.0
_BYTES = 32 << 20  # of a message, as of a bucket of gradients
_LEAST_S, _LEAST_ROUNDS = 0.5, 3


def measure(directory: Path) -> None:
    import torch
    from torch import distributed

    device = environment.trial_device(read_value(TrialRequest, directory / "request.json").device)
    environment.meet(device, timeout_s=LIMIT_S)
    message, world = torch.zeros(_BYTES // 4, device=device), distributed.get_world_size()

    def seconds(rounds: int) -> float:
        started = time.perf_counter()
        for _ in range(rounds):
            distributed.all_reduce(message)
        message[0].item()  # which waits for all of them
        return time.perf_counter() - started

    seconds(1)  # opens the channels
    usual = torch.tensor([seconds(1)])
    distributed.broadcast(usual, src=0)
    rounds = max(_LEAST_ROUNDS, int(_LEAST_S / float(usual)))
    # A ring over all devices leaves each machine once, with nearly twice the message.
    rate = 2 * (world - 1) / world * _BYTES * rounds / seconds(rounds)
    if environment.own_rank().local == 0:
        write_text(str(rate), directory / FILE)
