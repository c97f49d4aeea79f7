"""The probe looks into a real Trainer, and finds what was asked for and did not happen."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import make_gpu, make_hardware
from own_trainings import quiet_arguments
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.attention import SDPBackend
from transformers import AutoModelForCausalLM, FalconConfig, Trainer, TrainingArguments

from autotune.errors import NoEffectError
from autotune.execution.effects import EffectsProbe, attention_kernel
from autotune.training.adapters import prepare_model
from autotune.training.arguments import training_plan
from autotune.training.build import build_model
from autotune.training.dataset import training_data
from autotune.values.config import Parallelism, TrainConfig
from autotune.values.hardware import detect

# The libraries' own, to each other: the argument's old name, which peft still uses.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


def asked(**fields: Any) -> TrainConfig:
    usual = {"per_device_train_batch_size": 2, "attn_implementation": "eager", "dataloader_pin_memory": False}
    return TrainConfig(**{**usual, **fields})


@pytest.fixture
def train(bench, tmp_path: Path):
    """Return a function that really trains two steps, and then has the probe look for what `config` asks for.

    Arguments and model are given beside the configuration, so that they may differ from it.
    """

    def trained(config: TrainConfig, *, model: Any = None, **arguments: Any) -> dict[str, str]:
        workload = bench.request().workload
        if model is None:
            model = plain_model(bench)
        dataset, collator = training_data(workload, model.config, samples=16, directory=None)
        probe = EffectsProbe(config, detect("cpu"))
        args = quiet_arguments(tmp_path, **{"max_steps": 2, "per_device_train_batch_size": 2, **arguments})
        trainer = Trainer(model=model, args=args, train_dataset=dataset, data_collator=collator, callbacks=[probe])
        trainer.train()
        return probe.verify(trainer)

    return trained


def plain_model(bench, *, dtype: str = "float32") -> Any:
    workload = bench.request().workload
    return build_model(workload.model, workload.task, dtype=dtype, attn_implementation="eager", device="cpu")


def test_each_knob_is_confirmed(train):
    assert train(asked()) == {
        "precision": "weights float32, layer outputs float32", "tf32": "none",
        "optim": "torch.optim.adamw.AdamW fused=True", "checkpointing": "none", "attn_implementation": "eager",
        "experts_implementation": "none to choose", "use_liger_kernel": "none", "chunked_loss": "of all logits",
        "torch_compile_backend": "none", "activation_memory_budget": "all kept", "dataloader_num_workers": "0",
        "train_sampling_strategy": "of the same number of samples", "packing": "a row a sample",
        "pad_to_multiple_of": "to the longest", "torch_empty_cache_steps": "never emptied",
        "expandable_segments": "none", "adapter": "none, 139584 parameters trained", "quantization": "none",
        "parallelism": "one device",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "arguments", "reason"),
    [
        ({"optim": "adamw_torch_fused"}, {"optim": "sgd"}, r"adamw_torch_fused .* but torch.optim.sgd.SGD ran"),
        ({"optim": "adamw_torch_fused"}, {"optim": "adamw_torch"}, "but fused is None"),
        ({"optim": "adamw_torch"}, {"optim": "adamw_torch_fused"}, "but fused is True"),
        ({"optim": "adamw_bnb_8bit"}, {"optim": "adamw_torch"}, r"but torch.optim.adamw.AdamW ran"),
        ({"optim": "adamw_bnb_8bit"}, {"optim": "paged_adamw_32bit"}, "but optim_bits is 32"),
        ({"optim": "paged_adamw_8bit"}, {"optim": "adamw_8bit"}, "but is_paged is False"),
        ({"optim": "adafactor"}, {"optim": "adamw_torch"}, "adafactor was asked for"),
        ({"train_sampling_strategy": "batch_rebalance"}, {}, "batch_rebalance was asked for, but BatchSampler ran"),
        ({}, {"train_sampling_strategy": "batch_rebalance"}, "random was asked for, but BatchRebalanceSampler ran"),
        ({"pad_to_multiple_of": 48}, {}, "multiples of 48 were asked for, not .16."),
        ({"packing": True}, {}, "packing True was asked for, but it is False"),
        ({"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4},
         {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
         "dataloader_prefetch_factor 4 was asked for, but it is 2"),
        ({"checkpointing": "full"}, {}, "no layer has it switched on"),
        ({}, {"gradient_checkpointing": True}, "no checkpointing was asked for"),
        ({"precision": "bf16"}, {}, "bf16 was asked for, but autocast is off"),
        ({"precision": "fp16"}, {}, "fp16 was asked for, but autocast is off"),
        ({"precision": "fp32"}, {"bf16": True}, "fp32 was asked for, but layers put out bfloat16"),
        ({"precision": "pure_bf16"}, {}, "pure_bf16 was asked for, but layers put out float32"),
        ({"torch_compile_backend": "aot_eager"}, {}, "no graph was compiled"),
        pytest.param({}, {"torch_compile": True, "torch_compile_backend": "eager"}, "but the model is compiled",
                     marks=pytest.mark.slow),
        ({"dataloader_num_workers": 2}, {}, "dataloader_num_workers 2 was asked for, but it is 0"),
        ({"attn_implementation": "sdpa"}, {}, "attention sdpa was asked for, but it is eager"),
        ({"checkpointing": "every-2nd"}, {"gradient_checkpointing": True},
         "checkpointing every 2 layers of 2, so 1 was asked for, but it is 2"),
        ({"checkpointing": "full"},
         {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
         "use_reentrant=False was asked for, but it is True"),
        ({"use_liger_kernel": True}, {}, "use_liger_kernel True was asked for, but it is False"),
        ({"chunked_loss": True}, {}, "chunked_loss True was asked for, but it is False"),
        ({"activation_memory_budget": 0.5}, {}, "activation_memory_budget 0.5 was asked for, but it is 1"),
        ({"experts_per_token": 1}, {}, "experts_per_token 1 was asked for, but it is None"),
        ({"torch_empty_cache_steps": 4}, {}, "torch_empty_cache_steps 4 was asked for, but it is None"),
        ({}, {"torch_empty_cache_steps": 4}, "torch_empty_cache_steps None was asked for, but it is 4"),
        ({"torch_empty_cache_steps": 4}, {"torch_empty_cache_steps": 4},
         "every 4 steps, but the first emptied no cache"),
        ({"expandable_segments": True}, {}, "expandable_segments True was asked for, but 0 of 0 segments are"),
        ({"adapter": {}}, {}, "139584 of 139584 parameters are trained"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_a_knob_without_effect_is_found(train, config, arguments, reason):
    with pytest.raises(NoEffectError, match=reason):
        train(asked(**config), **{"optim": "adamw_torch_fused", **arguments})


def test_layers_that_are_flagged_but_never_checkpointed_are_found(train, bench):
    model = plain_model(bench)
    for layer in model.model.layers:
        layer.eval()
        layer.train = lambda mode=True: None  # a layer checkpoints in training mode alone, and keeps out of it
    with pytest.raises(NoEffectError, match="switched on, but no layer was checkpointed"):
        train(asked(checkpointing="full"), model=model, **checkpointing())


def checkpointing() -> dict[str, Any]:
    name = "activation_checkpointing"
    return {name if hasattr(TrainingArguments, name) else "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("quantization", "more", "told"),
    [
        ("nf4", {"precision": "pure_bf16"}, "weights bfloat16/float32, layer outputs bfloat16"),
        ("int8", {"precision": "pure_bf16"}, "layer outputs bfloat16"),
        ("nf4", {"precision": "bf16", "chunked_loss": True}, "layer outputs autocast on"),
    ],
)
@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")
def test_beside_packed_weights_it_is_the_models_own_layers_that_tell_the_precision(
    train, bench, quantization, more, told
):
    """peft keeps an adapter's weights in fp32, packed layers put out their input's dtype, as a chunked loss's head."""
    request = bench.request(config={"adapter": {}, "quantization": quantization, **more})
    mapping = training_plan(request.config, request.workload, detect("cpu"))
    spec, task = request.workload.model, request.workload.task
    model = build_model(spec, task, device="cpu", quantization=mapping.quantization, **mapping.model)
    model = prepare_model(model, mapping.adapter, request.config)
    assert train(request.config, model=model, bf16=mapping.tuned["bf16"])["precision"].endswith(told)


def test_layers_with_a_forward_of_their_own_do_not_tell_the_precision(train):
    """Falcon's add an fp32 bias to a product in 16 bits, which makes it fp32 again."""
    figures = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "bias": True}
    model = AutoModelForCausalLM.from_config(FalconConfig(**figures), attn_implementation="eager")
    assert train(asked(precision="bf16"), model=model, bf16=True)["precision"].endswith("layer outputs bfloat16")


def test_an_attention_kernel_is_told_as_autocast_hands_it_queries(monkeypatch):
    """Rotary positions leave queries and keys in fp32, which autocast casts before a kernel is chosen."""
    query, value = torch.ones(1, 2, 8, 16, requires_grad=True), torch.ones(1, 2, 8, 16, dtype=torch.bfloat16)
    asked_with: list[Any] = []

    def choice(*tensors: Any, **options: Any) -> int:
        asked_with.append([None if t is None else (t.dtype, t.requires_grad) for t in tensors[:4]])
        return int(SDPBackend.FLASH_ATTENTION.value)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention_kernel(query, query, value, torch.zeros(8, 8)) == "flash"
    attention_kernel(query, query, query)
    half, whole = torch.bfloat16, torch.float32
    assert asked_with[0] == [(half, True), (half, True), (half, False), (half, False)]
    assert asked_with[1] == [(whole, True)] * 3


COMPILED = {"torch_compile_backend": "inductor"}


@pytest.mark.parametrize(
    ("hardware", "config", "set_to", "seen"),
    [
        (make_gpu(), {}, "highest", "ieee"), (make_gpu(), {}, "high", None),
        (make_gpu(), {"tf32": True}, "high", "tf32"), (make_gpu(), {"tf32": True}, "highest", None),
        (make_gpu(), COMPILED, "high", "tf32"), (make_gpu(), COMPILED, "highest", None),
        (make_gpu(), {**COMPILED, "precision": "bf16"}, "high", "tf32"),
        (make_gpu(), {**COMPILED, "precision": "fp16"}, "highest", "ieee"),
        (make_gpu(starts_with_tf32=True), {"tf32": True}, "high", "tf32"),
        (make_gpu(capability=(7, 5)), COMPILED, "high", "none"),  # accelerate sets it whatever the device
        (make_hardware(), COMPILED, "high", "none"),
    ],
)  # fmt: skip
def test_tf32_is_expected_where_a_trainer_has_it_on(hardware, config, set_to, seen):
    """`set_to`: how products in fp32 are computed, by torch's older interface; 'high' is TF32."""
    trainer = SimpleNamespace(model=None, callback_handler=SimpleNamespace(train_dataloader=None))
    probe = EffectsProbe(asked(**config), hardware)
    torch.set_float32_matmul_precision(set_to)
    try:
        if seen is None:
            with pytest.raises(NoEffectError, match="but matrix products in fp32 are"):
                probe.verify(trainer, ("tf32",))
        else:
            assert probe.verify(trainer, ("tf32",))["tf32"] == seen
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_model_of_another_precision_or_with_adapters_that_nobody_asked_for_is_found(train, bench):
    with pytest.raises(NoEffectError, match="bf16 was asked for, but weights are bfloat16"):
        train(asked(precision="bf16"), model=plain_model(bench, dtype="bfloat16"), bf16=True)
    model = get_peft_model(plain_model(bench), LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))
    with pytest.raises(NoEffectError, match="no adapter was asked for"):
        train(asked(), model=model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" in name  # something else is trained in their place
    with pytest.raises(NoEffectError, match="lora was asked for, but no adapter is trained"):
        train(asked(adapter={"rank": 4}), model=model)


def test_no_hook_stays_in_the_model_after_the_first_step(train, bench):
    model = plain_model(bench)
    train(asked(checkpointing="full"), model=model, **checkpointing())
    functions = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    functions += [getattr(module, "_gradient_checkpointing_func", None) for module in model.modules()]
    assert not any("autotune" in getattr(function, "__module__", "") for function in functions)


def test_attention_keeps_the_name_by_which_torch_puts_its_ring_in_its_place():
    probe = EffectsProbe(asked(attn_implementation="sdpa"), detect("cpu"))
    probe.on_train_begin(None, None, None, model=nn.Linear(1, 1))
    try:
        attention, tokens = nn.functional.scaled_dot_product_attention, torch.randn(1, 2, 4, 8)
        assert attention.__name__ == "scaled_dot_product_attention"
        assert attention(query=tokens, key=tokens, value=tokens).shape == tokens.shape
    finally:
        probe.on_step_end(None, None, None)
    assert nn.functional.scaled_dot_product_attention is not attention


class DeepSpeedEngine:
    """The part of DeepSpeed's that is looked at."""

    def __init__(self, stage: int, held: int, *, optimizer_at: str | None = None, sharing: int = 1) -> None:
        self.module, self.sequence_parallel_size = nn.Linear(100, 100, bias=False), sharing
        self.optimizer = SimpleNamespace(single_partition_of_fp32_groups=[torch.empty(held)])
        offload = None if optimizer_at is None else SimpleNamespace(device=optimizer_at)
        self.zero_optimization_stage, self.zero_offload_param = lambda: stage, lambda: None
        self.zero_offload_optimizer = lambda: offload


@pytest.fixture
def seen(monkeypatch):
    """Return a function that tells how a training of two ranks, or of as many as `ran`, is spread."""

    def look(wrapper: Any, *, ran: int = 2, known: int = 2, **spread: Any) -> str:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ran > 1)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ran)
        args, handler = SimpleNamespace(world_size=known), SimpleNamespace(train_dataloader=None)
        trainer = SimpleNamespace(model=wrapper, model_wrapped=wrapper, args=args, callback_handler=handler)
        config = asked(parallelism=Parallelism(world_size=2, **spread))
        return EffectsProbe(config, make_hardware()).verify(trainer, ("parallelism",))["parallelism"]

    return look


SHARING = nn.Linear(1, 1)
SHARING._tp_size = 2


@pytest.mark.parametrize(
    ("wrapper", "asked_for", "told"),
    [
        (DeepSpeedEngine(2, 5000), {"sharding": "zero_2"}, "DeepSpeed ZeRO-2 over 2"),
        (DeepSpeedEngine(2, 5000, sharing=2), {"sharding": "zero_2", "sequence_parallel": 2},
         "DeepSpeed ZeRO-2 over 2, sequence parallel 2"),
        (DeepSpeedEngine(1, 5000, optimizer_at="cpu"), {"sharding": "zero_1", "offload": "optimizer"},
         "DeepSpeed ZeRO-1 over 2, optimizer offloaded to the host"),
    ],
)  # fmt: skip
def test_the_split_that_deepspeed_has_made_is_told(seen, wrapper, asked_for, told):
    assert seen(wrapper, **asked_for) == told


@pytest.mark.parametrize(
    ("wrapper", "asked_for", "said"),
    [
        # ranks that are not there, or that nobody keeps alike
        (nn.Linear(1, 1), {"ran": 1, "known": 1}, "2 devices were asked for, but 1 ranks ran"),
        (nn.Linear(1, 1), {"ran": 2, "known": 1}, "2 devices were asked for, but 2 ranks ran"),
        (nn.Linear(1, 1), {"ran": 4, "known": 4}, "2 devices were asked for, but 4 ranks ran"),
        (nn.Linear(1, 1), {}, "2 copies were to be kept alike by DDP, but the model is a Linear"),
        # tokens that nobody shares
        (nn.Linear(1, 1), {"sharding": "fsdp_full", "sequence_parallel": 2},
         "context parallel 2 was asked for, but it is 1"),
        # matrices that nobody shares
        (nn.Linear(1, 1), {"tensor_parallel": 2}, "tensor parallel 2 was asked for, but it is None"),
        (SHARING, {"tensor_parallel": 2}, "this one holds 100%"),
        # DeepSpeed that does something else
        (nn.Linear(1, 1), {"sharding": "zero_2"}, "but the model is wrapped as Linear"),
        (DeepSpeedEngine(1, 5000), {"sharding": "zero_2"}, "stage 2 was asked for, but it is 1"),
        (DeepSpeedEngine(2, 5000, optimizer_at="cpu"), {"sharding": "zero_2"},
         r"offloaded to \('none', 'none'\), but are to \('cpu', 'none'\)"),
        (DeepSpeedEngine(2, 5000, sharing=2), {"sharding": "zero_2"}, "sequence parallel 1 was asked for, but it is 2"),
        (DeepSpeedEngine(2, 10_000), {"sharding": "zero_2"}, "2 ranks were to split it, but this one holds 100%"),
    ],
)  # fmt: skip
def test_a_spread_that_is_another_is_found(seen, wrapper, asked_for, said):
    with pytest.raises(NoEffectError, match=said):
        seen(wrapper, **asked_for)
