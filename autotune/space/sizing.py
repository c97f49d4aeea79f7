"""How many points a search space has on this machine, for a model that leaves open as much as any. Pure."""

from __future__ import annotations

from autotune.space.file import SpaceFile
from autotune.space.space import SearchSpace
from autotune.training.baseline import baseline_config
from autotune.values.budget import Effort
from autotune.values.config import Allowance, Workload
from autotune.values.hardware import Hardware
from autotune.values.model import EXPERTS_IMPLEMENTATIONS, HUB_EXPERTS, ModelFacts, ModelSpec, Task
from autotune.values.problem import Problem

# Counting further would take seconds and tell no more.
MOST_POINTS = 5000

# A mixture of experts as large as Mixtral: of all kinds of models the one with the most knobs.
_MODEL = ModelSpec(reference="any", name="any", source="catalogue", model_type="mixtral", kind="decoder", config={})
_FACTS = ModelFacts(
    task=Task.CAUSAL_LM,
    parameters=1_000_000_000,
    attn_implementations=("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"),
    experts=8,
    experts_implementations=tuple(kind for kind in EXPERTS_IMPLEMENTATIONS if kind not in HUB_EXPERTS),
    experts_per_token=2,
    supports_checkpointing=True,
    layers=32,
    has_dropout=False,
    linear_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
)


def points_here(file: SpaceFile, hardware: Hardware, global_batch: int) -> int:
    """Return the legal points of a space at `--effort standard --allow method`, `MOST_POINTS` if there are more."""
    problem = Problem(
        workload=Workload(model=_MODEL, task=Task.CAUSAL_LM, sequence_length=512, global_batch_size=global_batch),
        facts=_FACTS,
        hardware=hardware,
        memory_bytes=hardware.memory_bytes,
        allowance=Allowance.METHOD,
        baseline=baseline_config(None, global_batch, _FACTS, hardware),
    )
    space = SearchSpace(file, problem, effort=Effort.STANDARD)
    return sum(1 for _ in zip(range(MOST_POINTS), space.points(), strict=False))
