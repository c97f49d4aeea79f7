"""The probe looks into a real Trainer, and finds what was asked for and did not happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from autotune.config import TrainConfig
from autotune.data import training_data
from autotune.execution.effects import EffectsProbe
from autotune.execution.no_effect import NoEffectError
from autotune.models import build_model

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

    def trained(config: TrainConfig, *, model: Any = None, steps: int = 2, **arguments: Any) -> dict[str, str]:
        workload = bench.request().workload
        if model is None:
            model = plain_model(bench)
        dataset, collator = training_data(workload, model.config, samples=16, directory=None)
        probe = EffectsProbe(config)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                str(tmp_path),
                **{
                    "use_cpu": True,
                    "max_steps": steps,
                    "per_device_train_batch_size": 2,
                    "report_to": "none",
                    "save_strategy": "no",
                    "disable_tqdm": True,
                    "dataloader_pin_memory": False,
                    **arguments,
                },
            ),
            train_dataset=dataset,
            data_collator=collator,
            callbacks=[probe],
        )
        trainer.train()
        return probe.verify(trainer, trainer.model)

    return trained


def plain_model(bench, *, dtype: str = "float32", attention: str = "eager") -> Any:
    request = bench.request()
    return build_model(
        request.workload.model, request.workload.task, dtype=dtype, attn_implementation=attention, device="cpu"
    )


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))


def test_what_was_asked_for_is_confirmed(train):
    assert train(asked()) == {
        "precision": "weights float32, layer outputs float32",
        "tf32": "none",
        "optim": "torch.optim.adamw.AdamW fused=True",
        "checkpointing": "none",
        "attn_implementation": "eager",
        "experts_implementation": "none to choose",
        "use_liger_kernel": "none",
        "torch_compile_backend": "none",
        "dataloader_num_workers": "0",
        "packing": "a row a sample",
        "adapter": "none, 139584 parameters trained",
        "quantization": "none",
        "parallelism": "one device",
    }


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
        ({"packing": True}, {}, "packing True was asked for, but micro-batches are a row a sample"),
        (
            {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4},
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
            "prefetching 4 was asked for, but 2 ran",
        ),
        ({"checkpointing": "full"}, {}, "no layer of the model has it switched on"),
        ({}, {"gradient_checkpointing": True}, "no checkpointing was asked for"),
        ({"precision": "bf16"}, {}, "bf16 was asked for, but autocast is off"),
        ({"precision": "fp16"}, {}, "fp16 was asked for, but autocast is off"),
        ({"precision": "fp32"}, {"bf16": True}, "fp32 was asked for, but layers put out bfloat16"),
        ({"precision": "pure_bf16"}, {}, "pure_bf16 was asked for, but layers put out float32"),
        ({"torch_compile_backend": "aot_eager"}, {}, "no graph was compiled"),
        pytest.param(
            {},
            {"torch_compile": True, "torch_compile_backend": "eager"},
            "but the model is compiled",
            marks=pytest.mark.slow,
        ),
        ({"dataloader_num_workers": 2}, {}, "2 data-loader workers were asked for, but 0 ran"),
        ({"attn_implementation": "sdpa"}, {}, "attention sdpa was asked for, but eager ran"),
        ({"checkpointing": "every-2nd"}, {"gradient_checkpointing": True}, "every 2 layers were to be checkpointed"),
        (
            {"checkpointing": "reentrant"},
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            "use_reentrant=True was asked for, but it is False",
        ),
        ({"use_liger_kernel": True}, {}, "Liger was asked for, but 0 modules run its kernels"),
        ({"experts_per_token": 1}, {}, "experts_per_token 1 was asked for, but the model has None"),
        ({"adapter": {}}, {}, "139584 of 139584 parameters are trained"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_what_was_asked_for_and_did_not_happen_is_found(train, config, arguments, reason):
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
    """Return the argument by the name of the installed version."""
    name = "activation_checkpointing"
    return {name if hasattr(TrainingArguments, name) else "gradient_checkpointing": True}


def test_real_checkpointing_is_counted_by_layer(train):
    assert train(asked(checkpointing="full"), **checkpointing())["checkpointing"].startswith("2 checkpointed calls")


def test_weights_of_another_precision_are_found(train, bench):
    with pytest.raises(NoEffectError, match="bf16 was asked for, but weights are bfloat16"):
        train(asked(precision="bf16"), model=plain_model(bench, dtype="bfloat16"), bf16=True)


def test_attention_that_was_changed_later_is_found(train, bench):
    model = plain_model(bench, attention="sdpa")
    model.config._attn_implementation = "eager"
    with pytest.raises(NoEffectError, match="attention sdpa was asked for, but eager ran"):
        train(asked(attn_implementation="sdpa"), model=model)


def test_adapters_train_and_nothing_else_does(train, bench):
    assert train(asked(adapter={"rank": 4}), model=lora(plain_model(bench)))["adapter"].startswith("lora, 8192 of ")


def test_adapters_that_train_nothing_are_found(train, bench):
    model = lora(plain_model(bench))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" in name  # something else is trained in their place
    with pytest.raises(NoEffectError, match="lora was asked for, but no adapter is trained"):
        train(asked(adapter={"rank": 4}), model=model)


def test_a_model_with_adapters_where_none_was_asked_for_is_found(train, bench):
    with pytest.raises(NoEffectError, match="no adapter was asked for"):
        train(asked(), model=lora(plain_model(bench)))


def test_an_optimizer_that_is_not_known_in_detail_is_reported_by_its_class(train):
    assert train(asked(optim="rmsprop"), optim="rmsprop")["optim"] == "torch.optim.rmsprop.RMSprop"


def test_nothing_stays_in_the_model_after_the_first_step(train, bench):
    model = plain_model(bench)
    train(asked(checkpointing="full"), model=model, **checkpointing())
    functions = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    functions += [getattr(module, "_gradient_checkpointing_func", None) for module in model.modules()]
    assert not any("autotune" in getattr(function, "__module__", "") for function in functions)
