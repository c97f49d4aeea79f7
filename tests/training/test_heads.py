"""The heads of a type of model, the one that config.json names, and what is said of another."""

import pytest
from conftest import write_model
from tiny_models import TINY, tiny

from autotune.errors import InputError
from autotune.training.build import build_config, describe
from autotune.training.resolve import default_task, head_notes, resolve, tasks_for
from autotune.values.model import UNTRAINED, Task


def test_the_tasks_of_a_type_are_the_heads_it_has_and_another_is_refused():
    of_bert = {Task.CAUSAL_LM, Task.MASKED_LM, Task.SEQUENCE_CLASSIFICATION}
    assert set(tasks_for(resolve("bert-base-uncased").model_type)) == of_bert
    assert tasks_for(resolve("resnet-50").model_type) == (Task.IMAGE_CLASSIFICATION,)
    assert tasks_for(resolve("wav2vec2-base").model_type) == (Task.SPEECH_CTC, Task.AUDIO_CLASSIFICATION)
    assert tasks_for(resolve("whisper-tiny").model_type) == (Task.SPEECH_SEQ2SEQ, Task.AUDIO_CLASSIFICATION)
    with pytest.raises(InputError, match=r"'t5' has no head for image-classification .*seq2seq-lm"):
        build_config(resolve("t5-small"), Task.IMAGE_CLASSIFICATION)


@pytest.mark.parametrize(
    ("name", "architecture", "task"),
    [
        ("bert", "BertForMaskedLM", Task.MASKED_LM),
        ("bert", "BertForSequenceClassification", Task.SEQUENCE_CLASSIFICATION),
        ("bert", "BertModel", Task.SEQUENCE_CLASSIFICATION),
        ("llama", "LlamaForCausalLM", Task.CAUSAL_LM),
        ("llama", "LlamaForSequenceClassification", Task.SEQUENCE_CLASSIFICATION),
        ("llama", "LLaMAForCausalLM", Task.CAUSAL_LM),  # no class of transformers
        ("t5", "T5ForConditionalGeneration", Task.SEQ2SEQ_LM),
        ("vit", "ViTModel", Task.IMAGE_CLASSIFICATION),
        ("wav2vec2", "Wav2Vec2ForSequenceClassification", Task.AUDIO_CLASSIFICATION),
        ("whisper", "WhisperForConditionalGeneration", Task.SPEECH_SEQ2SEQ),
    ],
)
def test_the_head_that_the_config_names_is_trained(tmp_path, name, architecture, task):
    assert default_task(tiny(tmp_path, name, architectures=[architecture])) is task


@pytest.mark.parametrize(
    ("config", "architecture", "others"),
    [
        ({"model_type": "clip"}, "CLIPModel", "image-classification"),
        ({"model_type": "segformer"}, "SegformerForSemanticSegmentation", "image-classification"),
        (TINY["bert"], "BertForTokenClassification", "causal-lm or masked-lm or sequence-classification"),
        ({"model_type": "llama4"}, "Llama4ForConditionalGeneration", "causal-lm"),
        ({"model_type": "llava_onevision"}, "LlavaOnevisionForConditionalGeneration", ""),  # no head at all
    ],
)
def test_a_head_that_can_not_be_trained_is_refused_by_its_name_with_ways_out(tmp_path, config, architecture, others):
    folder = write_model(tmp_path / "mine", {**config, "architectures": [architecture]})
    with pytest.raises(InputError, match=rf"mine\S*: {architecture} has no head that can be trained") as refusal:
        default_task(resolve(str(folder)))
    assert "autotune script -- python train.py" in str(refusal.value)
    assert not others or str(refusal.value).endswith(f"--task {others}")


@pytest.mark.parametrize("model_type", ["git", "pp_lcnet", "qwen2_audio", "siglip2"])
def test_a_type_that_can_not_be_trained_here_is_refused_with_the_reason(tmp_path, model_type):
    said = f"mine/config.json: model type '{model_type}' {UNTRAINED[model_type]}; tune a script"
    with pytest.raises(InputError, match=said):
        resolve(str(write_model(tmp_path / "mine", {"model_type": model_type})))


def test_ids_of_a_type_whose_config_has_no_vocabulary_are_those_of_its_characters(tmp_path):
    spec = resolve(str(write_model(tmp_path / "mine", {"model_type": "canine"})))
    assert build_config(spec, Task.SEQUENCE_CLASSIFICATION).vocab_size == 0x110000


def test_another_head_or_attention_than_the_named_one_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.values.model.installed_versions", dict)
    named = tiny(tmp_path, "bert", architectures=["BertForMaskedLM"])
    (line,) = head_notes(named, Task.SEQUENCE_CLASSIFICATION)
    assert line.startswith("trained is BertForSequenceClassification (--task sequence-classification) in place of")
    (line,) = head_notes(named, Task.MASKED_LM)
    assert line == "the head is that of BertForMaskedLM in config.json: masked-lm (--task)"
    llama = tiny(tmp_path, "llama", architectures=["LlamaForCausalLM"], _attn_implementation="flash_attention_2")
    line, note = head_notes(llama, Task.SEQUENCE_CLASSIFICATION, "reward")
    assert line.startswith("trained is LlamaForSequenceClassification (--recipe reward) in place of")
    assert [note] == head_notes(llama, Task.CAUSAL_LM)
    assert note == "config.json's flash_attention_2 needs the package flash-attn: another attention takes its place"
    assert describe(llama, Task.CAUSAL_LM).attn_implementations[0] == "sdpa"
    assert head_notes(tiny(tmp_path, "bert"), Task.MASKED_LM) == []
    assert head_notes(resolve("bert-base-uncased"), Task.SEQUENCE_CLASSIFICATION) == []


def test_a_part_for_images_that_is_not_fed_is_said(tmp_path):
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}
    spec = resolve(str(write_model(tmp_path, config)))
    assert default_task(spec) is Task.IMAGE_TEXT_TO_TEXT
    (line,) = head_notes(spec, Task.CAUSAL_LM)
    assert line.startswith("images are left out: the trials train on text alone")
