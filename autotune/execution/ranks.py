"""The ranks of a trial, seen from inside: who this process is, how it meets the others, and how they decide together.

A trial over several devices has one process for each device, as under torchrun. The launcher has imported everything
and forks them, which takes tens of milliseconds where torchrun's fresh interpreters take some ten seconds each. The
Trainer reads the same environment variables that torchrun sets (`rank_environment`). Two things are done here that the
libraries do by themselves under torchrun:

* The processes meet before the Trainer would have them meet, at a port that the launcher has held since before they
  were forked, so that nobody else can take it; torchrun's workers meet at their agent's. The limit of a collective is
  the trial's, since on the CPU `TrainingArguments.ddp_timeout` is not passed on.
* A group that computes on CUDA can send tensors of the host as well, which decisions need.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# The listening socket of the first rank, open in its process, and how many threads each may use.
_LISTENER, _THREADS = "AUTOTUNE_RANK_LISTENER", "OMP_NUM_THREADS"
ADDRESS = "127.0.0.1"

# Variables of other launchers, by which libraries would take a trial for one of their processes.
FOREIGN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", _LISTENER,
)  # fmt: skip


class Rank(NamedTuple):
    """One process of a trial."""

    number: int = 0
    of: int = 1
    is_launched: bool = False  # as one of a group, which may have one member

    @property
    def is_first(self) -> bool:
        """Whether it decides for all."""
        return self.number == 0


def rank_environment(number: int, of: int, port: int, listener: int | None = None) -> dict[str, str]:
    """Return the variables that torchrun sets for rank `number` of `of` on one machine, and the rank's threads.

    torchrun gives each rank one thread unless OMP_NUM_THREADS is set: the exported command sets it (see
    `threads_of_rank`).

    Args:
        number: The rank.
        of: The number of ranks, all on this machine.
        port: Where they meet.
        listener: The open socket that listens there, for the first rank alone.
    """
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(number)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(of)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        _THREADS: str(threads_of_rank(len(os.sched_getaffinity(0)), of)),
        **({_LISTENER: str(listener)} if listener is not None else {}),
    }


def threads_of_rank(cores: int, ranks: int, present: Mapping[str, str] = os.environ) -> int:
    """Return the threads of each rank: its share of the cores, or fewer if the user's environment says so."""
    share, asked = max(1, cores // ranks), present.get(_THREADS, "")
    return min(share, int(asked)) if asked.isdigit() and int(asked) else share


def use_cores(cores: Sequence[int]) -> None:
    """Bind this process to some cores, and have it use as many threads, or fewer if the user's environment says so."""
    os.sched_setaffinity(0, cores)
    threads = threads_of_rank(len(cores), 1)
    os.environ[_THREADS] = str(threads)
    if "torch" in sys.modules:  # a fork has the settings of its parent, which were made for all cores
        import torch
        from torch._inductor import config

        torch.set_num_threads(threads)
        config.compile_threads = min(config.compile_threads or 1, len(cores))


def own_rank() -> Rank:
    """Return which rank this process is, by its environment; alone if it is none."""
    if "LOCAL_RANK" not in os.environ:
        return Rank()
    return Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), is_launched=True)


def meet(device: str, *, timeout_s: float) -> None:
    """Wait for the other ranks, so that collectives work from here on; `timeout_s` is the trial's."""
    rank = own_rank()
    if not rank.is_launched:
        return
    import torch
    from torch.distributed import TCPStore, init_process_group  # type: ignore[attr-defined]

    # Beyond the trial's, so that a collective that hangs is reported as a trial that timed out.
    limit = datetime.timedelta(seconds=timeout_s + 120.0)
    listener = os.environ.get(_LISTENER)
    torch.set_num_threads(int(os.environ[_THREADS]))  # a fork has the threads of its parent
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        rank.of,
        rank.is_first,
        limit,
        wait_for_workers=False,
        master_listen_fd=int(listener) if listener is not None else None,
    )
    # Nothing touches the device here: what its context takes is for the memory guard to see.
    backend = "gloo" if device == "cpu" else "cuda:nccl,cpu:gloo"
    init_process_group(backend, store=store, rank=rank.number, world_size=rank.of, timeout=limit)


def agree(decision: bool) -> bool:
    """Return the first rank's decision, whatever this one's: a collective that only some go into waits for ever."""
    if not own_rank().is_launched:
        return decision
    import torch
    from torch import distributed

    flag = torch.tensor([int(decision)])
    distributed.broadcast(flag, src=0)
    return bool(flag.item())


def wait_for_all() -> None:
    """Wait until every rank has come here."""
    if own_rank().is_launched:
        import torch

        open_channels(torch.zeros(1))


def open_channels(tensor: Any) -> None:
    """Sum `tensor` over all ranks, for which the libraries open their channels to its device."""
    if own_rank().is_launched:
        from torch import distributed

        distributed.all_reduce(tensor)
