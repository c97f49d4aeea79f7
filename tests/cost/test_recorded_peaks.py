"""Predicted memory against peaks that torch's own allocator counted in real trials.

They were recorded on the stand-in for an A100 or a T4 (tests/fakecuda; torch 2.11, transformers 5.24): no CUDA device
is needed here. `test_on_the_allocator` runs such trials itself.
"""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from factories import make_gpu, make_hardware, make_workload
from profiles import make_rates

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
    """Peaks in bytes of a trial with micro-batches of `size` samples, three steps."""

    model: str | dict[str, Any]  # its config.json
    length: int
    size: int
    fields: dict[str, Any]
    allocated: int
    reserved: int
    evaluation: Evaluation | None = None  # after the last step
    task: Task | None = None  # None: the model's own
    capability: tuple[int, int] = (8, 0)  # of a T4 or of an A100
    micro_batches: int = 1  # of a step


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
    "no states of weights without a gradient": Recorded(  # those of global attention
        {"model_type": "led", "encoder_layers": 3, "decoder_layers": 2}, 512, 2,
        {"attn_implementation": "eager"}, 3_283_733_504, 3_464_495_104,
    ),
    "norms of 16 bits in fp32": Recorded(
        {"model_type": "swinv2"}, 1, 16, {"attn_implementation": "eager"}, 1_847_062_528, 2_126_512_128
    ),
    "what math attention holds in fp32 until its end": Recorded(
        {"model_type": "stablelm", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
         "num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 4},
        1000, 4, {"precision": "fp16", "checkpointing": "full", "optim": "lion_32bit"},
        2_741_883_904, 2_919_235_584, capability=(7, 5), micro_batches=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_peaks_are_those_predicted(name, tmp_path):
    recorded, gpus = RECORDED[name], {(7, 5): "Tesla T4", (8, 0): "NVIDIA A100-SXM4-80GB"}
    if isinstance(recorded.model, dict):
        (tmp_path / "config.json").write_text(json.dumps(recorded.model))
    spec = resolve(str(tmp_path) if isinstance(recorded.model, dict) else recorded.model)
    gpu = make_gpu(name=gpus[recorded.capability], capability=recorded.capability)
    usual = {"per_device_train_batch_size": recorded.size, "attn_implementation": "sdpa", "precision": "bf16"}
    config = TrainConfig.model_validate({**usual, **recorded.fields})
    workload = make_workload(
        model=spec, task=recorded.task or default_task(spec), sequence_length=recorded.length,
        target_length=recorded.length,
        global_batch_size=recorded.size * recorded.micro_batches * config.parallelism.world_size,
    )  # fmt: skip
    traced = profile(spec, family_of(config, gpu), shape_of(workload))
    model = replace(CostModel.of(workload, gpu, rates_by_table(gpu), [traced]), evaluation=recorded.evaluation)
    found = model.breakdown(config, traced)
    assert found.allocated_peak_bytes == pytest.approx(recorded.allocated, rel=0.005)
    assert found.reserved_peak_bytes == pytest.approx(recorded.reserved, rel=0.03)


# Llama of 21 million parameters, 64 tokens, by two processes (DeepSpeed 0.19.8, gloo): the most that a trial's resident
# set grew by, in MiB, with micro-batches of 1 (four of them) and 4.
ON_CPU = {
    ("none", "fp32"): (438, 414), ("none", "bf16"): (467, 417), ("zero_1", "fp32"): (377, 378),
    ("zero_1", "bf16"): (258, 258), ("zero_2", "fp32"): (417, 378), ("zero_2", "bf16"): (278, 258),
    ("zero_3", "fp32"): (475, 475), ("zero_3", "bf16"): (308, 308),
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip


def test_recorded_peaks_of_two_processes_of_a_cpu_are_those_predicted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    workload = make_workload(model=resolve(str(tmp_path)), sequence_length=64, global_batch_size=8)
    cpu = make_hardware()
    usual = {"optim": "adamw_torch_fused", "attn_implementation": "sdpa"}
    configs = {
        (sharding, precision, size): TrainConfig.model_validate(
            {**usual, "precision": precision, "per_device_train_batch_size": size,
             "parallelism": {"world_size": 2, "sharding": sharding}}
        )
        for sharding, precision in ON_CPU for size in (1, 4)
    }  # fmt: skip
    families = {family_of(config, cpu) for config in configs.values()}
    traced = [profile(workload.model, family, shape_of(workload)) for family in families]
    model = CostModel.of(workload, cpu, make_rates(), traced)
    for (sharding, precision, size), config in configs.items():
        recorded = ON_CPU[sharding, precision][size == 4]
        assert model.estimate(config).memory.device_peak_bytes / 2**20 == pytest.approx(recorded, rel=0.05), config
