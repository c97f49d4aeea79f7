"""Every kind of adapter trains: itself and nothing else, the same step however the batch is split.

One model in one process with the real Trainer; what a trial's own process adds is `test_named_models`'s.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch
from factories import make_hardware
from optimizer_steps import arguments_for, step_taken
from tiny_models import TINY

from autotune.execution.effects import EffectsProbe
from autotune.training.adapters import CLASSIFICATION_HEADS, adapter_arguments, peft_config, prepare_model
from autotune.training.build import build_model
from autotune.values.config import TrainConfig
from autotune.values.model import ModelSpec, Task
from autotune.values.techniques import ADAPTERS, is_new_weight

BERT = {**TINY["bert"], "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": (Task.CAUSAL_LM, "decoder", TINY["llama"]),
    "t5": (Task.SEQ2SEQ_LM, "encoder-decoder", {**TINY["t5"], "dropout_rate": 0.0, "num_decoder_layers": 3}),
    "bert": (Task.SEQUENCE_CLASSIFICATION, "encoder", BERT),
    "mixtral": (Task.CAUSAL_LM, "decoder", TINY["mixtral"]),
}
LENGTH = 6

# peft asks for it where a model is wrapped for its task; asked for by nobody here.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def build(name, kind, **fields):
    task, model_kind, figures = MODELS[name]
    spec = ModelSpec(reference=name, name=name, source="catalogue", model_type=name, kind=model_kind, config=figures)
    torch.manual_seed(0)
    model = build_model(spec, task, dtype="float32", attn_implementation=None, device="cpu")
    adapter = ADAPTERS[kind](**fields)
    return adapter, prepare_model(model, adapter_arguments(adapter, task))


def seen_adapter(model, adapter):
    trainer = SimpleNamespace(model=model, callback_handler=SimpleNamespace(train_dataloader=None))
    config = TrainConfig(per_device_train_batch_size=2, adapter=adapter)
    return EffectsProbe(config, make_hardware()).verify(trainer, ("adapter",))["adapter"]


def samples(name):
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        ids = torch.randint(3, 96, (LENGTH,), generator=generator)
        labels = torch.randint(3, 96, (LENGTH,), generator=generator)
        if MODELS[name][0] is Task.SEQUENCE_CLASSIFICATION:
            labels = torch.randint(0, 2, (), generator=generator)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def step(model, name, folder, micro_batch=8):
    """Return loss and gradients of one optimizer step."""
    return step_taken(model, arguments_for(folder, micro_batch, 8 // micro_batch, optim="sgd"), list(samples(name)))


CASES = [
    *(("llama", kind) for kind in ADAPTERS if kind != "bitfit"),
    *(("t5", kind) for kind in ("lora", "prefix")),
    *(pytest.param("t5", kind, marks=pytest.mark.slow) for kind in ("ia3", "prompt")),
    *(pytest.param("bert", kind, marks=pytest.mark.slow) for kind in ("lora", "prompt")),
    ("bert", "bitfit"),
]


def reference(model, name):
    """Return loss and gradients of the whole batch, without a Trainer."""
    batch = {key: torch.stack([s[key] for s in samples(name)]) for key in ("input_ids", "attention_mask", "labels")}
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_adapter_trains_alone_and_the_step_of_the_whole_batch_however_it_is_split(name, kind, tmp_path):
    adapter, model = build(name, kind)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    loss, gradients = step(model, name, tmp_path, micro_batch=2)
    assert gradients.keys() == trained
    own = {n for n in trained if n.split(".")[0] not in CLASSIFICATION_HEADS}
    assert all(n.endswith("bias") if kind == "bitfit" else is_new_weight(n) for n in own)
    assert seen_adapter(model, adapter).startswith(kind)

    expected, whole = reference(build(name, kind)[1], name)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(gradients[n], whole[n], rtol=1e-4, atol=1e-6) for n in trained)


def test_lora_reaches_the_fused_weights_of_experts(tmp_path):
    _, model = build("mixtral", "lora", target_modules="all-linear+experts")
    _, gradients = step(model, "mixtral", tmp_path)
    assert [n for n in gradients if ".experts." in n and "lora_B" in n and gradients[n].any()]
    _, without = build("mixtral", "lora", target_modules="attention")
    assert not [n for n, p in without.named_parameters() if ".experts." in n and p.requires_grad]


def test_a_classifiers_head_is_trained_beside_the_adapter():
    for kind in ("lora", "prompt"):
        trained = [n for n, p in build("bert", kind)[1].named_parameters() if p.requires_grad]
        assert [n for n in trained if "classifier.modules_to_save" in n], kind


def test_bitfit_without_biases_is_refused():
    with pytest.raises(ValueError, match="the model has none"):
        build("llama", "bitfit")


@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if kind != "bitfit"])
def test_the_arguments_make_pefts_own_config_without_a_warning(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = peft_config(adapter_arguments(ADAPTERS[kind](), Task.CAUSAL_LM))
    assert config.task_type == "CAUSAL_LM"


def test_an_adapter_other_than_asked_for_is_found():
    _, model = build("llama", "lora")
    with pytest.raises(Exception, match="dora was asked for, but use_dora is False, not True"):
        seen_adapter(model, ADAPTERS["dora"]())
