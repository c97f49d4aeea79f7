"""One optimizer step of a tiny model of each head: built, taken by a real Trainer, and computed without any.

The reference is the plain model's own loss over the whole batch. Dropout is 0 throughout.
"""

import copy
import functools
import json

import pytest
import torch
import transformers
from tiny_models import BOTH, NO_DROPOUT, SIZES, TINY, TOKENS
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autotune.execution.environment import meet, own_rank
from autotune.training.dataset import padded_batch
from autotune.training.inputs import image_or_sound
from autotune.training.loss import normalize_loss
from autotune.training.resolve import HEADS
from autotune.values.model import Task

SAMPLES = 8
NEEDS_FLAG = pytest.mark.skipif(
    not hasattr(Trainer, "loss_is_scaled_for_ga"), reason="this transformers has no Trainer.loss_is_scaled_for_ga"
)

# Sums in another order: single precision keeps seven digits, of which a step's sums lose one or two.
TOLERANCE = 1e-5
# A router's loss looks at the balance between experts within one micro-batch, so the split changes it: seen were
# 4e-4 of the whole loss and 2e-2 of the largest gradient.
OF_ROUTERS = {"loss": 1e-3, "gradients": 5e-2}

LLAMA = {**TINY["llama"], **TOKENS}
MIXTRAL = {**TINY["mixtral"], **TOKENS, "router_jitter_noise": 0.0}
BERT = {**TINY["bert"], "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKENS,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}  # fmt: skip
T5 = {**TINY["t5"], "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 2}
BART = {
    "vocab_size": 96, "d_model": 32, **BOTH, "max_position_embeddings": 64, "dropout": 0.0, **TOKENS,
    "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
WAV2VEC2 = {
    **TINY["wav2vec2"], "vocab_size": 16, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    **dict.fromkeys(NO_DROPOUT, 0.0), "mask_time_prob": 0.0,
}  # fmt: skip
WHISPER = {**TINY["whisper"], "num_mel_bins": 4, "max_source_positions": 20, "max_target_positions": 16}

# Model type, task, configuration.
MODELS = {
    "Llama": ("llama", Task.CAUSAL_LM, LLAMA),
    "GPT-2": ("gpt2", Task.CAUSAL_LM, GPT2),
    "OPT": ("opt", Task.CAUSAL_LM, {
        **SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "dropout": 0.0, **TOKENS,
    }),
    "Mixtral": ("mixtral", Task.CAUSAL_LM, MIXTRAL),
    "Mamba": ("mamba", Task.CAUSAL_LM, {**TINY["mamba"], **TOKENS}),
    "BERT as a decoder": ("bert", Task.CAUSAL_LM, {**BERT, "is_decoder": True}),
    "BART's decoder alone": ("bart", Task.CAUSAL_LM, BART),
    "T5": ("t5", Task.SEQ2SEQ_LM, T5),
    "BART": ("bart", Task.SEQ2SEQ_LM, BART),
    "Switch": ("switch_transformers", Task.SEQ2SEQ_LM, {
        **T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
        "router_jitter_noise": 0.0,
    }),
    "BERT": ("bert", Task.MASKED_LM, BERT),
    "BERT classifier": ("bert", Task.SEQUENCE_CLASSIFICATION, {**BERT, "num_labels": 3}),
    "RoBERTa classifier": ("roberta", Task.SEQUENCE_CLASSIFICATION, {
        **BERT, "pad_token_id": 1, "num_labels": 3, "classifier_dropout": 0.0,
    }),
    "T5 classifier": ("t5", Task.SEQUENCE_CLASSIFICATION, {**T5, "num_labels": 3, "classifier_dropout": 0.0}),
    "GPT-2 classifier": ("gpt2", Task.SEQUENCE_CLASSIFICATION, {**GPT2, "num_labels": 3}),
    "ViT": ("vit", Task.IMAGE_CLASSIFICATION, TINY["vit"]),
    "wav2vec 2.0": ("wav2vec2", Task.SPEECH_CTC, WAV2VEC2),
    "wav2vec 2.0, a mean": ("wav2vec2", Task.SPEECH_CTC, {**WAV2VEC2, "ctc_loss_reduction": "mean"}),
    "wav2vec 2.0 classifier": ("wav2vec2", Task.AUDIO_CLASSIFICATION, {**WAV2VEC2, "num_labels": 3}),
    "Whisper": ("whisper", Task.SPEECH_SEQ2SEQ, WHISPER),
}  # fmt: skip
ROUTED = ("mixtral", Task.CAUSAL_LM, {**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 0.02})
RESNET = (
    "resnet",
    Task.IMAGE_CLASSIFICATION,
    {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3},
)
DEEPER = ("t5", Task.SEQ2SEQ_LM, {**T5, "num_decoder_layers": 3})
CASES = {**MODELS, "routed": ROUTED, "ResNet": RESNET, "T5 with a deeper decoder": DEEPER}


def plain(figures):
    return {name: value for name, value in figures.items() if name != "model_type"}


@functools.cache
def _built(name):
    kind, task, figures = CASES[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**plain(figures))
    model = getattr(transformers, HEADS[task][0]).from_config(config)
    for parameter in model.parameters():  # every gradient is to matter: some heads start at zero or next to it
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.train()


def build(name):
    return copy.deepcopy(_built(name))


def samples_for(name):
    """Return eight samples of eight lengths, with labels that the loss leaves out."""
    _, task, figures = CASES[name]
    random = torch.Generator().manual_seed(1)
    if task is Task.IMAGE_CLASSIFICATION:
        return [
            {"pixel_values": torch.randn(3, 16, 16, generator=random), "labels": torch.tensor(index % 3)}
            for index in range(SAMPLES)
        ]
    if task.takes_audio:
        return list(sound_for(CONFIG_MAPPING[CASES[name][0]](**plain(figures)), task, random))
    made = []
    for index, length in enumerate((5, 14, 3, 9, 12, 4, 16, 7)):
        ids = torch.randint(3, figures["vocab_size"], (length,), generator=random)
        ids[-1] = 2  # the end, which T5's classifier looks for
        made.append({"input_ids": ids, "labels": _labels(task, ids, index, random)})
    return made


def sound_for(config, task, random):
    """Eight recordings, with transcripts that are equally long where their mean is one over recordings."""
    key, shape, _ = image_or_sound(config, 24)
    for index in range(SAMPLES):
        length = 6 if config.to_dict().get("ctc_loss_reduction") == "mean" else 3 + index
        labels = torch.arange(3, 15)[torch.randperm(12, generator=random)]  # no repetitions, which need blanks
        padded = torch.where(torch.arange(12) < length, labels, -100)
        label = torch.tensor(index % 3) if task is Task.AUDIO_CLASSIFICATION else padded
        yield {key: torch.randn(shape, generator=random), "labels": label}


def _labels(task, ids, index, random):
    if task is Task.SEQUENCE_CLASSIFICATION:
        return torch.tensor(index % 3)
    if task is Task.SEQ2SEQ_LM:
        return torch.randint(3, 96, (2 + index,), generator=random)
    labels = ids.clone()
    if task is Task.MASKED_LM:
        labels[torch.rand(len(ids), generator=random) < 0.5] = -100
        labels[0] = ids[0]
    elif index % 2:
        labels[: len(ids) // 2] = -100  # a prompt
    return labels


def collator_for(name):
    _, task, figures = CASES[name]
    return functools.partial(padded_batch, pad_id=figures["pad_token_id"]) if task.takes_text else default_data_collator


def reference(model, name, samples=None):
    """Return loss and gradients of the model's own mean over the whole batch."""
    model = copy.deepcopy(model)
    loss = model(**collator_for(name)(samples or samples_for(name))).loss
    loss.backward()
    return loss.item(), gradients_of(model)


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class GradientReader(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = gradients_of(model)


def arguments_for(directory, micro_batch, accumulation, **arguments):
    usual = {
        "output_dir": str(directory / "out"), "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation, "max_steps": 1, "max_grad_norm": 0, "use_cpu": True,
        "dataloader_pin_memory": False, "train_sampling_strategy": "sequential", "remove_unused_columns": False,
        "logging_nan_inf_filter": False, "report_to": "none", "disable_tqdm": True,
        **dict.fromkeys(("save_strategy", "eval_strategy", "logging_strategy"), "no"),
    }  # fmt: skip
    return TrainingArguments(**{**usual, **arguments})


def step_taken(model, arguments, rows, collator=None):
    """Return loss and gradients of one optimizer step of the real Trainer."""
    reader = GradientReader()
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[reader])
    return trainer.train().training_loss, reader.gradients


def one_step(model, name, directory, micro_batch, accumulation, samples=None, **arguments):
    made = arguments_for(directory, micro_batch, accumulation, **arguments)
    return step_taken(model, made, samples or samples_for(name), collator_for(name))


def distance(gradients, expected):
    """Return the largest difference as a share of the largest gradient."""
    assert gradients.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    return max(float((gradients[name] - expected[name]).abs().max()) for name in expected) / scale


def assert_same_step(step, expected, *, loss=TOLERANCE, gradients=TOLERANCE):
    assert step[0] == pytest.approx(expected[0], rel=loss)
    assert distance(step[1], expected[1]) < gradients


CASES_FILE, STEPS_FILE = "cases.json", "steps.pt"


def take_steps(directory):
    """Write down what ranks make of each case's step, loss and gradients: an entry for the launcher."""
    meet("cpu", timeout_s=120)
    steps = {}
    for name, accumulation in json.loads((directory / CASES_FILE).read_text()):
        micro_batch = SAMPLES // own_rank().of // accumulation
        loss, gradients = one_step(normalize_loss(build(name)), name, directory, micro_batch, accumulation)
        total = torch.tensor(loss)
        torch.distributed.all_reduce(total)
        steps[name, accumulation] = float(total) / own_rank().of, gradients
    if own_rank().number == 0:
        torch.save(steps, directory / STEPS_FILE)
