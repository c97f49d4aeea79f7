"""Profiles and rates by hand, in round figures, of which a test names only what it is about.

The model has one trained matrix of 4 MB in fp32. A sample keeps 1 MB of activations and takes 10 MFLOP; the device
does 100 MFLOP/s in fp32 and four times that in bf16. Nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from factories import make_hardware, make_workload

from autotune.cost.family import Family
from autotune.cost.model import CostModel
from autotune.cost.profile import CONTRACTION, Excerpt, Line, MemoryPoint, ParameterGroup, Profile, Work
from autotune.values.estimate import Rates

MB = 1_000_000


def make_group(*shape: int, count: int = 1, **fields: Any) -> ParameterGroup:
    return ParameterGroup(**{"shape": shape, "element_bytes": 4, "trained": True, "count": count, **fields})


def line(constant: float = 0.0, per_sample: float = 0.0) -> Line:
    return Line(constant=constant, per_sample=per_sample)


def make_point(**lines: tuple[float, float]) -> MemoryPoint:
    """Lines as (constant, per sample); those that are not named are 0."""
    names = ("activations", "temporaries", "gradients", "fresh_gradients")
    return MemoryPoint(operator="mm", **{name: line(*lines.get(name, (0.0, 0.0))) for name in names})


def make_family(**fields: Any) -> Family:
    """fp32 on a CPU."""
    return Family(**{"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa", **fields})


def make_work(flops: float = 10 * MB, moved: float = 0.0, **fields: Any) -> Work:
    """Figures of a sample."""
    defaults = {"kind": CONTRACTION, "half": False, "count": 1}
    return Work(**{**defaults, "flops": line(0, flops), "moved_bytes": line(0, moved), **fields})


def make_profile(family: Family | None = None, **fields: Any) -> Profile:
    matrix = make_group(1000, 1000)
    forward_end = make_point(activations=(0, MB))
    backward_end = make_point(gradients=(4 * MB, 0), fresh_gradients=(4 * MB, 0))
    defaults = {
        "family": family or make_family(),
        "parameters": (matrix,),
        "buffers_bytes": 0,
        "peaks_first": (forward_end, backward_end),
        "peaks_later": (forward_end, backward_end),
        "work": (make_work(),),
        "excerpt": Excerpt(
            storages=((0, 1, 0.0, float(MB), False, 0),), parameters=(matrix,), workspaces=(0, 0), forward_end=1
        ),
        "needed_flops": line(0, 10 * MB),
        "traced_by": "meta",
    }
    return Profile(**{**defaults, **fields})


def make_rates(**fields: Any) -> Rates:
    defaults = {
        "matmul_flops": {"fp32": 1e8, "bf16": 4e8},
        "bandwidth": 1e12,
        "launch_s": 0.0,
        "host_bandwidth": 1e10,
        "source": "measured",
    }
    return Rates(**{**defaults, **fields})


def make_model(profiles: Sequence[Profile] | None = None, **fields: Any) -> CostModel:
    """Of a workload on a CPU that knows the fp32 family, unless other profiles are given."""
    return CostModel.of(
        **{
            "workload": make_workload(),
            "hardware": make_hardware(),
            "rates": make_rates(),
            "profiles": [make_profile()] if profiles is None else profiles,
            **fields,
        }
    )
