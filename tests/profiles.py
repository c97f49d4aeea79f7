"""Profiles and rates by hand, in round figures, of which a test names only what it is about.

The model has one trained matrix of 4 MB in fp32. A sample keeps 1 MB of activations and takes 10 MFLOP; the device
does 100 MFLOP/s in fp32 and four times that in bf16. Nothing here loads torch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from factories import make_hardware, make_workload

from autotune.cost.family import Family
from autotune.cost.memory import Components, components
from autotune.cost.model import CostModel
from autotune.cost.profile import CONTRACTION, Line, ParameterGroup, Profile, Storages, Work
from autotune.cost.sharding import Share, Spread, share_of
from autotune.values.config import Parallelism
from autotune.values.estimate import Rates

MB = 1_000_000
ONE_DEVICE = Spread(Parallelism(), mixed=False)


def make_group(*shape: int, count: int = 1, **fields: Any) -> ParameterGroup:
    return ParameterGroup(**{"shape": shape, "element_bytes": 4, "trained": True, "count": count, **fields})


def line(constant: float = 0.0, per_sample: float = 0.0) -> Line:
    return Line(constant=constant, per_sample=per_sample)


def make_storages(*rows: tuple[float, ...], forward_end: int = 1, **fields: Any) -> Storages:
    """Rows of (made, freed, constant bytes, bytes per sample, whether a gradient), of which the last can lack."""
    filled = np.array([(*row, *(0.0,) * (7 - len(row))) for row in rows], dtype=float).reshape(-1, 7)
    return Storages.of(filled, forward_end=forward_end, **fields)


def make_family(**fields: Any) -> Family:
    """fp32 on a CPU."""
    return Family(**{"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa", **fields})


def make_work(flops: float = 10 * MB, moved: float = 0.0, **fields: Any) -> Work:
    """Figures of a sample."""
    defaults = {"kind": CONTRACTION, "width": 4, "count": 1}
    return Work(**{**defaults, "flops": line(0, flops), "moved_bytes": line(0, moved), **fields})


def make_profile(family: Family | None = None, **fields: Any) -> Profile:
    parameters = fields.get("parameters") or (make_group(1000, 1000),)
    defaults = {
        "family": family or make_family(), "parameters": parameters,
        "order": tuple(at for at, group in enumerate(parameters) for _ in range(group.count)),
        "names": ("weight",) * sum(group.count for group in parameters), "buffers_bytes": 0,
        "storages": make_storages((0, 2, 0, MB), (2, 3, 4 * MB, 0, True), origins=(("", "mm"),)),
        "work": (make_work(),), "needed_flops": line(0, 10 * MB),
    }  # fmt: skip
    return Profile(**{**defaults, **fields})


def parts_of(
    profile: Profile, optim: str, micro_batch: float, accumulation: float, share: Share | None = None, **fields: Any
) -> Components:
    """The memory at the peak of a step on one device, or where a device holds a `share`."""
    share = share or share_of(profile, optim, ONE_DEVICE, accumulated=accumulation > 1)
    return components(profile, share, micro_batch, accumulation, **fields)


def make_rates(**fields: Any) -> Rates:
    defaults = {
        "matmul_flops": {"fp32": 1e8, "bf16": 4e8}, "bandwidth": 1e12, "launch_s": 0.0, "host_bandwidth": 1e10,
        "source": "a data sheet",
    }  # fmt: skip
    return Rates(**{**defaults, **fields})


def make_model(profiles: Sequence[Profile] | None = None, **fields: Any) -> CostModel:
    """Of a workload on a CPU that knows the fp32 family, unless other profiles are given."""
    known = [make_profile()] if profiles is None else profiles
    usual = {"workload": make_workload(), "hardware": make_hardware(), "rates": make_rates()}
    return CostModel.of(**{**usual, "profiles": known, **fields})
