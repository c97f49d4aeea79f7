"""Seconds of an optimizer step of one of several devices: its computing, its optimizer's part, and its waiting.

`time` knows what one device computes, `communication` what it waits for others, `offloading` what it waits for the
host. On a CPU all ranks share the cores. Pure arithmetic on arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.cost.communication import Passes, exposed_seconds
from autotune.cost.network import Network
from autotune.cost.offload import host_seconds
from autotune.cost.profile import Profile
from autotune.cost.sharding import Spread, stepped
from autotune.cost.time import micro_step_seconds, optimizer_seconds, step_seconds
from autotune.values.config import Parallelism
from autotune.values.estimate import Rates

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class StepCost:
    """What decides how long a step takes.

    Attributes:
        profile: Of one device's part of the model.
        rates: Of the device, alone.
        optim: The optimizer.
        spread: How it is spread.
        network: The devices.
        tf32: Whether fp32 contractions use tensor cores.
        compiled: Whether element-wise operators are fused.
    """

    profile: Profile
    rates: Rates
    optim: str
    spread: Spread
    network: Network
    tf32: bool = False
    compiled: bool = False

    def seconds(self, samples: Vector, accumulation: Vector) -> Vector:
        """Return the seconds of a step for each micro-batch with its accumulation."""
        if self.parallelism.is_single:
            return step_seconds(
                self.profile, self.rates, self.optim, samples, accumulation, tf32=self.tf32, compiled=self.compiled
            )
        adding = 3.0 * self.profile.gradients_bytes / self._rates.bandwidth
        computing = accumulation * self._micro(samples) + (accumulation - 1) * adding
        return computing + self._stepping() + self.waiting(samples, accumulation)

    def waiting(self, samples: Vector, accumulation: Vector) -> Vector:
        """Return the seconds of a step that the device waits for others or for the host."""
        if self.parallelism.is_single:
            return np.zeros_like(samples)
        micro = self._micro(samples)
        # The backward pass is twice the forward pass; what is recomputed is a forward pass more.
        backward = 2 + (self.profile.family.checkpointing not in ("none", "offload"))
        passes = Passes(micro / (1 + backward), micro * backward / (1 + backward))
        waiting = exposed_seconds(self.profile, self.parallelism, self.network, passes, samples, accumulation)
        if self.parallelism.offload == "none" or self.network.on_cpu:
            return waiting
        per_step, per_micro = host_seconds(self.profile, self.parallelism, self._rates, self.network.devices_per_node)
        return waiting + per_step + accumulation * per_micro

    @property
    def parallelism(self) -> Parallelism:
        """The degrees."""
        return self.spread.parallelism

    @property
    def _rates(self) -> Rates:
        """The rates that one device has while all compute."""
        share = self.parallelism.world_size if self.network.on_cpu else 1
        if share == 1:
            return self.rates
        products = {arithmetic: flops / share for arithmetic, flops in self.rates.matmul_flops.items()}
        return self.rates.model_copy(update={"matmul_flops": products, "bandwidth": self.rates.bandwidth / share})

    def _micro(self, samples: Vector) -> Vector:
        return micro_step_seconds(self.profile, self._rates, samples, tf32=self.tf32, compiled=self.compiled)

    def _stepping(self) -> float:
        """Return the seconds of the optimizer's step, of which a device does its part where states are dealt out."""
        if self.parallelism.offload != "none" and not self.network.on_cpu:
            return 0.0
        part = self.profile.model_copy(update={"parameters": stepped(self.profile, self.spread)})
        return optimizer_seconds(part, self._rates, self.optim)
