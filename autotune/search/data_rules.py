"""Rules of legality for the order of samples and their packing: both save padding, where there is any.

Pure; of the form that `rules` asks for.
"""

from __future__ import annotations

from autotune.architecture import ModelFacts, Task
from autotune.config import TrainConfig, Workload
from autotune.hardware import Hardware


def sampling(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Return why the order of the samples can't help."""
    if config.train_sampling_strategy != "group_by_length":
        return None
    if not _lengths_differ(workload):
        return "grouping by length: all samples have one length (real data, --data, have many)"
    return "packed batches have no padding that grouping by length could save" if config.packing else None


def packing(config: TrainConfig, workload: Workload, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Return why samples can't share a row."""
    if not config.packing:
        return None
    if workload.task is not Task.CAUSAL_LM:
        return f"packing joins the texts of causal models; the task is {workload.task}"
    if not _lengths_differ(workload):
        return "packing: all samples have one length, so there is no padding (real data, --data, have many)"
    if not facts.packs:
        return f"packing: {workload.model.model_type} lets the samples of a row see each other"
    if config.attn_implementation == "eager":
        return "packing with eager attention would hold the scores of every sample against all others"
    if config.adapter is not None and config.adapter.prompt_length:
        return f"packing: {config.adapter.kind} puts its virtual tokens before a row, not before each sample"
    return None


def _lengths_differ(workload: Workload) -> bool:
    return workload.lengths is not None and workload.lengths.minimum < workload.lengths.maximum
