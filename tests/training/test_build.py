"""The library config of a model and a head, and the model that is built."""

import pytest
import torch
import transformers
from conftest import write_model
from tiny_models import on_cpu, tiny

from autotune.errors import InputError
from autotune.training.build import build_config, describe
from autotune.training.resolve import default_task, resolve
from autotune.values.model import ModelSpec, Task


def test_a_classifier_has_as_many_labels_as_from_pretrained_gives_it(tmp_path):
    for name, labels in {"bert-base-uncased": 2, "bart-base": 3, "llama-2-7b": 2}.items():
        assert build_config(resolve(name), Task.SEQUENCE_CLASSIFICATION).num_labels == labels
    spec = tiny(tmp_path, "bert", id2label={"0": "bad", "1": "fair", "2": "good"})
    assert build_config(spec, Task.SEQUENCE_CLASSIFICATION).num_labels == 3
    assert build_config(tiny(tmp_path, "vit"), Task.IMAGE_CLASSIFICATION).num_labels == 3
    assert build_config(resolve("vit-base"), Task.IMAGE_CLASSIFICATION).num_labels == 1000
    assert build_config(tiny(tmp_path, "bert"), Task.CAUSAL_LM).is_decoder  # an encoder that generates


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "falcon-7b", "qwen2.5-0.5b"])
def test_a_decoder_that_classifies_knows_what_padding_is(name):
    config = build_config(resolve(name), Task.SEQUENCE_CLASSIFICATION)
    assert 0 <= config.pad_token_id < config.vocab_size


def test_infinity_is_read_as_either_version_of_the_library_writes_it(tmp_path):
    for name, written in (("five", {"__float__": "Infinity"}), ("four", float("inf"))):
        config = {"model_type": "mamba2", "time_step_limit": [0.0, written]}
        spec = resolve(str(write_model(tmp_path / name, config)))
        again = ModelSpec.model_validate_json(spec.model_dump_json())  # as another process gets it
        assert list(build_config(again, Task.CAUSAL_LM).time_step_limit) == [0.0, float("inf")]


@pytest.mark.parametrize("name", ["llama", "mixtral", "mamba", "bert", "t5", "vit"])
def test_building_on_the_device_gives_what_the_library_builds(tmp_path, name):
    spec = tiny(tmp_path, name)
    task = default_task(spec)
    torch.manual_seed(0)
    model = on_cpu(spec, task)
    torch.manual_seed(0)
    reference = getattr(transformers, type(model).__name__)(build_config(spec, task))
    for (name, tensor), (other_name, other) in zip(
        [*model.named_parameters(), *model.named_buffers()],
        [*reference.named_parameters(), *reference.named_buffers()],
        strict=True,
    ):
        assert (name, tensor.dtype) == (other_name, other.dtype)
        assert torch.equal(tensor, other)


@pytest.mark.parametrize(
    ("name", "figures", "attention", "words"),
    [
        ("mamba", {}, "flash_attention_9", "can't be built"),
        ("mamba", {}, "flex_attention", "can't be built: MambaForCausalLM does not support"),
        ("bert", {"hidden_size": 33}, None, r"can't be built: .*33"),
    ],
)
def test_what_the_library_refuses_is_told_on_one_line(tmp_path, name, figures, attention, words):
    with pytest.raises(InputError, match=words) as refusal:
        on_cpu(tiny(tmp_path, name, **figures), Task.CAUSAL_LM, attn_implementation=attention)
    assert "\n" not in str(refusal.value)


def test_running_out_of_memory_is_not_mistaken_for_bad_input(tmp_path):
    spec = tiny(tmp_path, "llama", vocab_size=2**24, hidden_size=2**16)
    with pytest.raises(RuntimeError, match="memory"):
        on_cpu(spec, Task.CAUSAL_LM)


def test_output_weights_are_apart_or_tied_as_the_config_says(tmp_path):
    spec = tiny(tmp_path, "t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    model = on_cpu(spec, Task.SEQ2SEQ_LM)
    assert model.lm_head.weight is not model.shared.weight
    # A checkpoint of such a model, loaded by the library, has the same parameters.
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    model.save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert loaded.num_parameters() == model.num_parameters()
    assert describe(spec, Task.SEQ2SEQ_LM).parameters == model.num_parameters()
    tied = on_cpu(tiny(tmp_path, "t5", tie_word_embeddings=True), Task.SEQ2SEQ_LM)
    assert tied.lm_head.weight is tied.shared.weight


@pytest.mark.parametrize("name", ["whisper", "pegasus", "marian"])
def test_what_a_class_freezes_is_trained_as_in_a_checkpoint(tmp_path, name):
    """Loading thaws the positions of all three, though no checkpoint of Marian's has them."""
    heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes = {**heads, "encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "vocab_size": 99, "pad_token_id": 0}
    spec = resolve(str(write_model(tmp_path / name, {"model_type": name, "decoder_start_token_id": 0, **sizes})))
    model = on_cpu(spec, default_task(spec))
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    trained, read = ({n for n, p in m.named_parameters() if p.requires_grad} for m in (model, loaded))
    assert trained == read
