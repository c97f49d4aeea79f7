"""Predicted memory against peaks that torch's own allocator counted in real trials.

They were recorded on the stand-in for an A100 (tests/fakecuda; torch 2.11, transformers 5.24): no CUDA device is
needed here. `test_on_the_allocator` runs such trials itself.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from factories import make_gpu, make_workload

from autotune.cost.family import family_of, shape_of
from autotune.cost.model import CostModel
from autotune.cost.profiler import profile
from autotune.cost.rates import rates_by_table
from autotune.training.resolve import default_task, resolve
from autotune.values.config import TrainConfig
from autotune.values.estimate import Evaluation
from autotune.values.model import Task

LORA = {"kind": "lora", "rank": 8}
FSDP = {"optim": "adamw_torch_fused", "parallelism": {"world_size": 2, "sharding": "fsdp_full"}}


class Recorded(NamedTuple):
    """Peaks in bytes of a trial with micro-batches of `size` samples, three steps of one each."""

    model: str
    length: int
    size: int
    fields: dict[str, Any]
    allocated: int
    reserved: int
    evaluation: Evaluation | None = None  # after the last step
    task: Task | None = None  # None: the model's own


RECORDED = {
    "large logits": Recorded("gpt2", 512, 4, {}, 10_072_520_192, 13_377_732_608, Evaluation(batch=32)),
    "an evaluation after checkpointing": Recorded(
        "meta-llama/Llama-3.2-1B", 1024, 1,
        {"precision": "pure_bf16", "checkpointing": "full", "optim": "adamw_bnb_8bit"},
        11_838_450_176, 15_896_412_160, Evaluation(batch=4),
    ),
    "kept logits": Recorded(
        "bert-base-uncased", 512, 8, {"optim": "adamw_torch_fused"},
        13_849_799_168, 33_149_681_664, Evaluation(batch=16, kept_samples=100), Task.MASKED_LM,
    ),
    "states before the first step": Recorded("gpt2", 512, 8, {"optim": "adagrad"}, 7_016_918_528, 7_602_176_000),
    "FSDP: GELU without autocast": Recorded("gpt2", 512, 8, FSDP, 5_547_096_064, 6_836_715_520),
    "FSDP: norms without autocast": Recorded("facebook/opt-125m", 512, 8, FSDP, 4_343_135_232, 5_593_104_384),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_peaks_are_those_predicted(name):
    recorded = RECORDED[name]
    spec, gpu = resolve(recorded.model), make_gpu(name="NVIDIA A100-SXM4-80GB")
    usual = {"per_device_train_batch_size": recorded.size, "attn_implementation": "sdpa", "precision": "bf16"}
    config = TrainConfig.model_validate({**usual, **recorded.fields})
    workload = make_workload(
        model=spec, task=recorded.task or default_task(spec), sequence_length=recorded.length,
        target_length=recorded.length, global_batch_size=recorded.size * config.parallelism.world_size,
    )  # fmt: skip
    traced = profile(spec, family_of(config, gpu), shape_of(workload))
    model = replace(CostModel.of(workload, gpu, rates_by_table(gpu), [traced]), evaluation=recorded.evaluation)
    found = model.breakdown(config, traced)
    assert found.allocated_peak_bytes == pytest.approx(recorded.allocated, rel=0.005)
    assert found.reserved_peak_bytes == pytest.approx(recorded.reserved, rel=0.03)
