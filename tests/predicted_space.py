"""A space of twenty points with a cost model that knows them all, for tests of what predictions lead to."""

import itertools

from factories import make_space_file
from profiles import MB, make_family, make_group, make_model, make_profile, make_rates, make_storages, make_work

from autotune.cost.model import CostModel

SPACE = make_space_file(
    {"precision": ["fp32", "bf16"], "checkpointing": ["none", "full"], "per_device_train_batch_size": "lattice"}
)
GB = 1000 * MB


def profile_of(precision: str, checkpointing: str, kept: int = GB):
    """Of weights of 400 MB: bf16 is four times as fast, checkpointing half as fast for a tenth of what is kept."""
    flops, activations = (10 * MB, kept) if checkpointing == "none" else (20 * MB, 0.1 * kept)
    return make_profile(
        make_family(autocast="bfloat16" if precision == "bf16" else None, checkpointing=checkpointing),
        parameters=(make_group(10_000, 10_000),),
        storages=make_storages((0, 2, 0, activations)),
        work=(make_work(flops, width=2 if precision == "bf16" else 4),),
    )


KINDS = tuple(itertools.product(("fp32", "bf16"), ("none", "full")))
PROFILES = [profile_of(*kind) for kind in KINDS]


def make_model_of(profiles=PROFILES) -> CostModel:
    """Larger micro-batches are a little faster: each has some launches of its own."""
    return make_model(profiles, rates=make_rates(launch_s=2e-2))
