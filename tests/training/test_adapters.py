"""Every kind of adapter trains: itself and nothing else, the same step however the batch is split.

One model in one process with the real Trainer; what a trial's own process adds is `test_named_models`'s.
"""

from types import SimpleNamespace

import optimizer_steps
import pytest
import torch
from factories import make_hardware
from optimizer_steps import CASES, assert_same_step, one_step, reference
from peft.tuners.tuners_utils import BaseTunerLayer

from autotune.execution.effects import EffectsProbe
from autotune.training.adapters import CLASSIFICATION_HEADS, adapter_arguments, prepare_model
from autotune.values.config import TrainConfig
from autotune.values.techniques import ADAPTERS, is_new_weight


def build(name, kind, **fields):
    adapter, model = ADAPTERS[kind](**fields), optimizer_steps.build(name)
    torch.manual_seed(0)
    config = TrainConfig(per_device_train_batch_size=2, adapter=adapter)
    model_type, task, _ = CASES[name]
    return adapter, prepare_model(model, adapter_arguments(adapter, task, model_type), config)


def seen_adapter(model, adapter):
    trainer = SimpleNamespace(model=model, callback_handler=SimpleNamespace(train_dataloader=None))
    config = TrainConfig(per_device_train_batch_size=2, adapter=adapter)
    return EffectsProbe(config, make_hardware()).verify(trainer, ("adapter",))["adapter"]


T5 = "T5 with a deeper decoder"  # of which prefixes count the layers


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("Llama", kind) for kind in ADAPTERS if kind != "bitfit"),
        *((T5, kind) for kind in ("lora", "prefix")),
        ("Mamba", "lora"),
        *(pytest.param(T5, kind, marks=pytest.mark.slow) for kind in ("ia3", "prompt")),
        *(pytest.param("BERT classifier", kind, marks=pytest.mark.slow) for kind in ("lora", "prompt")),
        ("BERT classifier", "bitfit"),
    ],
)
def test_an_adapter_trains_alone_and_the_step_of_the_whole_batch_however_it_is_split(name, kind, tmp_path):
    adapter, model = build(name, kind)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    step = one_step(model, name, tmp_path, 2, 4)
    assert step[1].keys() == trained
    own = {n for n in trained if n.split(".")[0] not in CLASSIFICATION_HEADS}
    assert all(n.endswith("bias") if kind == "bitfit" else is_new_weight(n) for n in own)
    assert seen_adapter(model, adapter).startswith(kind)
    assert_same_step(step, reference(build(name, kind)[1], name))


@pytest.mark.parametrize("precision", ["bf16", "pure_bf16"])
@pytest.mark.parametrize(
    ("adapter", "leaves_out"),
    [({}, True), ({"kind": "rslora"}, True), ({"kind": "dora"}, False), ({"dropout": 0.1}, False)],
)
def test_under_autocast_peft_casts_no_inputs_where_that_changes_no_number(precision, adapter, leaves_out):
    config = TrainConfig(per_device_train_batch_size=2, precision=precision, adapter=adapter)

    def step(mixed: bool):
        model = optimizer_steps.build("Llama").to(torch.bfloat16 if precision == "pure_bf16" else torch.float32)
        given = config if mixed else config.model_copy(update={"precision": "fp32"})
        torch.manual_seed(0)
        model = prepare_model(model, adapter_arguments(config.adapter, CASES["Llama"][1]), given)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros at first
                parameter.data.normal_()
        ids = torch.arange(12).reshape(2, 6)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        layers = {m.cast_input_dtype_enabled for m in model.modules() if isinstance(m, BaseTunerLayer)}
        return layers, [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    (layers, ours), (usual, theirs) = step(True), step(False)
    assert (layers, usual) == ({not leaves_out}, {True})
    if leaves_out:
        assert len(ours) == len(theirs) > 1
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_lora_reaches_the_fused_weights_of_experts(tmp_path):
    _, model = build("Mixtral", "lora", target_modules="all-linear+experts")
    _, gradients = one_step(model, "Mixtral", tmp_path, 8, 1)
    assert [n for n in gradients if ".experts." in n and "lora_B" in n and gradients[n].any()]
    _, without = build("Mixtral", "lora", target_modules="attention")
    assert not [n for n, p in without.named_parameters() if ".experts." in n and p.requires_grad]


def test_a_classifiers_head_is_trained_beside_the_adapter():
    for kind in ("lora", "prompt"):
        trained = [n for n, p in build("BERT classifier", kind)[1].named_parameters() if p.requires_grad]
        assert [n for n in trained if "classifier.modules_to_save" in n], kind


def test_bitfit_without_biases_is_refused():
    with pytest.raises(ValueError, match="the model has none"):
        build("Llama", "bitfit")


def test_an_adapter_other_than_asked_for_is_found():
    _, model = build("Llama", "lora")
    with pytest.raises(Exception, match="dora was asked for, but use_dora is False, not True"):
        seen_adapter(model, ADAPTERS["dora"]())
