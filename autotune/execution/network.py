"""Measures the network between the machines of a training, by all-reduces among all of its devices."""

import time
from pathlib import Path

from autotune.errors import InfrastructureError
from autotune.execution import environment
from autotune.execution.outcome import log_file, read_tail
from autotune.execution.runner import LocalRunner
from autotune.value import read_value, write_text
from autotune.values.trial import TrialRequest

NETWORK_LIMIT_S = 120.0
_NETWORK_FILE = "network.txt"  # bytes/s that a machine attains to the others, one way
_BYTES = 32 << 20  # of a message, as of a bucket of gradients
_LEAST_S, _LEAST_ROUNDS = 0.5, 3


def measure_network(runner: LocalRunner, own: Path, request: TrialRequest) -> float:
    """Return the bytes/s that this node attains to those that run the other ranks; InfrastructureError: none."""
    entry, ranks, meeting = f"{__name__}:all_reduce", request.ranks, request.rendezvous
    directory = runner.ask("network", entry, request, timeout_s=NETWORK_LIMIT_S, ranks=ranks, rendezvous=meeting)
    try:
        return float((directory / _NETWORK_FILE).read_text())
    except OSError:
        told = read_tail(directory / log_file((request.ranks or (0,))[0]), lines=1) or "no answer"
        raise InfrastructureError(f"the machines don't reach each other: {told}") from None


def all_reduce(directory: Path) -> None:
    """Measure what this machine attains to the others, by all-reduces among all devices of a training."""
    import torch
    from torch import distributed

    device = environment.trial_device(read_value(TrialRequest, directory / "request.json").device)
    environment.meet(device, timeout_s=NETWORK_LIMIT_S)
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
        write_text(str(rate), directory / _NETWORK_FILE)
