"""The catalogue's figures, how a name becomes a model, and what is said of its classes."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from autotune.errors import InputError, UnknownModelError
from autotune.training.build import build_config, build_model, check_task, default_task, describe, tasks_of
from autotune.training.inputs import audio_input
from autotune.training.resolve import resolve
from autotune.values.catalogue import catalogue
from autotune.values.model import ModelSpec, Task

# Models small enough to train a step in milliseconds, as their config.json would be.
TINY = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mixtral": {
        "model_type": "mixtral",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mamba": {
        "model_type": "mamba",
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    },
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "roberta": {
        "model_type": "roberta",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 66,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    "t5": {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": 96,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "n_positions": 512,
    },
    "wav2vec2": {
        "model_type": "wav2vec2",
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "conv_dim": [8] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    },
    "whisper": {
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "vocab_size": 96,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "num_mel_bins": 8,
        "max_source_positions": 30,
        "max_target_positions": 20,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "vit": {
        "model_type": "vit",
        "image_size": 16,
        "patch_size": 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "id2label": {"0": "cat", "1": "dog", "2": "bird"},
    },
}


# Rates of wav2vec 2.0 that its config class sets where a config.json doesn't.
NO_DROPOUT = (
    "hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "layerdrop",
    "mask_feature_prob",
)  # fmt: skip


def write_model(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def tiny(tmp_path, name, **changes):
    """Resolve a tiny local model, with changes to its config."""
    return resolve(str(write_model(tmp_path / f"tiny-{name}", {**TINY[name], **changes})))


def on_cpu(spec, task, **options):
    return build_model(spec, task, **{"dtype": "float32", "attn_implementation": None, "device": "cpu", **options})


def without_dropout(config):
    return {k: 0.0 if "drop" in k or k.endswith("pdrop") else v for k, v in config.items()}


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("the network is not to be used here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def hub_cache(monkeypatch, tmp_path):
    """An empty cache of the hub's files, and no hub."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def hub(monkeypatch, hub_cache):
    """A hub on this machine that answers for one model, one gated model and nothing else."""
    from huggingface_hub import constants

    body = json.dumps(TINY["llama"]).encode()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(with_body=False)

        def do_GET(self):
            self.answer(with_body=True)

        def answer(self, *, with_body):
            repository, _, file = self.path.strip("/").partition("/resolve/main/")
            if repository == "some/llama" and file.startswith("config.json"):
                self.send_response(200)
                self.send_header("X-Repo-Commit", "a" * 40)
                self.send_header("ETag", '"etag"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)
                return
            error = {"some/gated": "GatedRepo", "some/weights": "EntryNotFound"}.get(repository, "RepoNotFound")
            self.send_response(403 if error == "GatedRepo" else 404)
            self.send_header("X-Error-Code", error)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    template = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


# The catalogue


# Every fourth in each test run, all of them with `pytest -m "slow or not slow"`.
ENTRIES = [
    pytest.param(entry, id=entry.id, marks=[pytest.mark.slow] if number % 4 else [])
    for number, entry in enumerate(catalogue())
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_figures_of_an_entry_give_its_parameters(entry):
    spec = resolve(entry.id)
    if entry.parameters_task == "base":
        import torch
        from transformers import AutoModel

        with torch.device("meta"):
            model = AutoModel.from_config(build_config(spec, default_task(spec)))
        parameters = sum(p.numel() for p in model.parameters())
    else:
        parameters = describe(spec, entry.parameters_task).parameters
    assert parameters == entry.parameters


@pytest.mark.parametrize("entry", catalogue(), ids=lambda e: e.id)
def test_an_entry_has_a_head_for_its_usual_task(entry):
    spec = resolve(entry.names[0])
    check_task(spec, default_task(spec))


def test_the_catalogue_is_wide():
    kinds = {entry.kind for entry in catalogue()}
    families = {entry.family for entry in catalogue()}
    assert len(catalogue()) >= 75
    assert kinds == {"decoder", "encoder", "encoder-decoder", "vision", "speech", "speech-to-text"}
    assert {"bert", "llama", "t5", "mixtral", "switch", "resnet", "mamba", "wav2vec2", "whisper"} <= families


def test_no_name_means_two_models():
    names = [name.lower() for entry in catalogue() for name in {entry.id, *entry.names}]
    assert len(names) == len(set(names))


def test_every_entry_says_where_its_figures_stand():
    for entry in catalogue():
        assert entry.source == f"https://huggingface.co/{entry.id}/blob/main/config.json"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("t5-small", 60_506_624),
        ("t5-3b", 2_851_598_336),
        ("gpt2", 124_439_808),
        ("llama-2-7b", 6_738_415_616),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_counts_known_by_heart(name, parameters):
    spec = resolve(name)
    assert describe(spec, default_task(spec)).parameters == parameters


# From a name to a model


@pytest.mark.parametrize(
    "reference", ["t5-small", "T5-Small", "google-t5/t5-small", "GOOGLE-T5/t5-small", " t5-small "]
)
def test_a_catalogue_name_in_any_case_leads_to_its_full_id(reference):
    spec = resolve(reference)
    assert (spec.name, spec.source, spec.model_type) == ("google-t5/t5-small", "catalogue", "t5")
    assert spec.reference == reference


@pytest.mark.usefixtures("no_network")
def test_a_catalogue_name_touches_no_network():
    spec = resolve("meta-llama/Llama-3.1-8B")
    assert describe(spec, default_task(spec)).parameters == 8_030_261_248


def test_the_catalogue_can_be_searched_without_torch():
    code = (
        "import sys; from autotune.training.resolve import resolve; resolve('t5-small');"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_changing_a_spec_leaves_the_catalogue_alone():
    resolve("llama-2-7b").config["rope_parameters"]["rope_theta"] = 1.0
    assert resolve("llama-2-7b").config["rope_parameters"]["rope_theta"] == 10000.0


def test_a_spec_survives_the_way_to_another_process():
    spec = resolve("mixtral-8x7b", revision="abc", trust_remote_code=True)
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.usefixtures("no_network", "hub_cache")
def test_an_unknown_name_is_refused_at_once_with_the_nearest_ones():
    start = time.monotonic()
    with pytest.raises(UnknownModelError) as refusal:
        resolve("t5-smal")
    assert time.monotonic() - start < 10
    message = str(refusal.value)
    assert message.startswith("model 't5-smal' is unknown: not in the catalogue (did you mean 't5-small'")
    assert "not a directory, not cached, and the hub does not answer" in message
    assert message.endswith("`autotune models` lists the catalogue")
    assert "\n" not in message


@pytest.mark.parametrize("reference", ["", "   "])
def test_an_empty_name_is_refused(reference):
    with pytest.raises(InputError, match="name is empty"):
        resolve(reference)


@pytest.mark.usefixtures("no_network", "hub_cache")
@pytest.mark.parametrize(
    "reference",
    [
        "a/b/c",
        "./no/such/directory",
        "../up",
        "two words",
        "line\nbreak",
        "nul\0byte",
        "~nobody/model",
        "x" * 9999,
    ],
)
def test_a_name_that_can_be_no_hub_id_is_refused_on_one_line(reference):
    with pytest.raises(UnknownModelError, match="and no hub id") as refusal:
        resolve(reference)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_offline_means_that_the_hub_is_not_asked(monkeypatch, hub):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnknownModelError, match="not cached, and HF_HUB_OFFLINE is set"):
        resolve("some/llama")


@pytest.mark.usefixtures("no_network")
def test_a_cached_hub_id_needs_no_network(hub_cache):
    repository = hub_cache / "models--some--llama"
    snapshot = write_model(repository / "snapshots" / ("b" * 40), TINY["llama"])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    spec = resolve("some/llama")
    assert (spec.name, spec.source, spec.kind) == ("some/llama", "hub", "decoder")
    assert spec.path == str(snapshot)
    assert resolve("some/llama", revision="b" * 40).revision == "b" * 40


@pytest.mark.usefixtures("hub")
def test_a_hub_id_is_fetched():
    spec = resolve("some/llama")
    assert (spec.source, spec.model_type, spec.config["hidden_size"]) == ("hub", "llama", 32)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("reference", "error", "words"),
    [
        ("some/other", UnknownModelError, "the hub has no such model"),
        ("some/gated", InputError, "access is gated"),
        ("some/weights", InputError, "has no config.json"),
    ],
)
def test_the_hubs_refusals_are_told_apart(reference, error, words):
    with pytest.raises(error, match=words):
        resolve(reference)


# Local directories


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "two words",
        'quote\'s "and" more',
        "[red]markup",
        "ünïcode-模型",
        "%s {x}",
        "-dash",
        "new\nline",
    ],
)
def test_a_directory_is_a_model_whatever_its_name(tmp_path, name):
    folder = write_model(tmp_path / name, TINY["llama"])
    spec = resolve(str(folder))
    assert (spec.name, spec.source, spec.path) == (name, "directory", str(folder))
    assert describe(spec, default_task(spec)).vocab_size == 96


def test_a_directory_named_like_a_catalogue_model_is_reached_by_its_path(tmp_path, monkeypatch):
    write_model(tmp_path / "gpt2", TINY["bert"])
    monkeypatch.chdir(tmp_path)
    assert resolve("gpt2").source == "catalogue"
    assert resolve("./gpt2").model_type == "bert"


def test_an_architecture_is_known_by_its_figures_whatever_it_is_called(tmp_path):
    def digest(folder: str, **figures) -> str | None:
        spec = resolve(str(write_model(tmp_path / folder, {**TINY["llama"], **figures})))
        return describe(spec, Task.CAUSAL_LM).architecture

    usual = digest("one")
    assert usual is not None
    assert digest("two", transformers_version="4.1", _name_or_path="x/y", dtype="float16", label2id={"a": 0, "b": 1},
                  id2label={"0": "a", "1": "b"}) == usual  # fmt: skip
    assert digest("three", hidden_act="gelu") != usual  # as many parameters, another model


def test_a_trailing_slash_is_no_part_of_the_name(tmp_path):
    assert resolve(f"{write_model(tmp_path / 'mine', TINY['t5'])}/").name == "mine"


@pytest.mark.parametrize(
    ("name", "kind", "task"),
    [
        ("llama", "decoder", Task.CAUSAL_LM),
        ("mixtral", "decoder", Task.CAUSAL_LM),
        ("mamba", "decoder", Task.CAUSAL_LM),
        ("bert", "encoder", Task.SEQUENCE_CLASSIFICATION),
        ("roberta", "encoder", Task.SEQUENCE_CLASSIFICATION),
        ("t5", "encoder-decoder", Task.SEQ2SEQ_LM),
        ("vit", "vision", Task.IMAGE_CLASSIFICATION),
        ("wav2vec2", "speech", Task.SPEECH_CTC),
        ("whisper", "speech-to-text", Task.SPEECH_SEQ2SEQ),
    ],
)
def test_kind_and_usual_task_follow_from_the_config(tmp_path, name, kind, task):
    spec = tiny(tmp_path, name)
    assert (spec.kind, default_task(spec)) == (kind, task)


def test_mistral_with_layers_of_several_types_is_ministral(tmp_path):
    layers = ["full_attention", "sliding_attention"]
    config = {**TINY["llama"], "model_type": "mistral", "layer_types": layers, "sliding_window": 8}
    assert resolve(str(write_model(tmp_path, config))).model_type == "ministral"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "must hold a JSON object, not a list"),
        ("{}", "lacks model_type"),
        ({"model_type": None}, "lacks model_type"),
        ({"model_type": 3}, "lacks model_type"),
        ({"model_type": "lama"}, "model type 'lama' is unknown to transformers .* \\(did you mean 'llama'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "transformers refuses its config"),
        ({"model_type": "pop2piano", "is_encoder_decoder": True}, "no head that can be trained here"),
        ({**TINY["llama"], "quantization_config": {"quant_method": "gptq"}}, "quantized already \\(gptq\\)"),
    ],
)
def test_a_malformed_config_is_refused_on_one_line(tmp_path, config, words):
    folder = write_model(tmp_path / "mine", config)
    with pytest.raises(InputError, match=words) as refusal:
        resolve(str(folder))
    assert "mine" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_config_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not valid JSON"):
        resolve(str(tmp_path))


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"not the directory of a model, it has no config\.json"):
        resolve(str(tmp_path))


def test_a_file_is_refused_with_the_remedy(tmp_path):
    write_model(tmp_path, TINY["llama"])
    with pytest.raises(InputError, match="is a file; give the directory"):
        resolve(str(tmp_path / "config.json"))


def test_figures_that_fit_no_model_are_refused_when_it_is_built(tmp_path):
    spec = tiny(tmp_path, "bert", hidden_size=33)
    with pytest.raises(InputError, match=r"can't be built: .*33") as refusal:
        on_cpu(spec, Task.MASKED_LM)
    assert "\n" not in str(refusal.value)


# Code that comes with a model

OWN_CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OwnConfig(PretrainedConfig):
    model_type = "very-own"

    def __init__(self, width=8, vocab_size=96, **kwargs):
        self.width = width
        self.vocab_size = vocab_size
        super().__init__(**kwargs)


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, config.width)
        self.head = torch.nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(self.embedding(input_ids))
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A model whose classes lie beside its config; reading the code leaves a mark."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    folder = write_model(tmp_path / "own", {"model_type": "very-own", "auto_map": classes, "width": 16})
    mark = tmp_path / "code-has-run"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\n{OWN_CODE}")
    return folder, mark


def test_code_that_comes_with_a_model_does_not_run_unasked(own_code):
    folder, mark = own_code
    with pytest.raises(InputError, match="runs only with --trust-remote-code"):
        resolve(str(folder))
    assert not mark.exists()


def test_code_that_is_trusted_builds_the_model(own_code):
    folder, mark = own_code
    spec = resolve(str(folder), trust_remote_code=True)
    assert (spec.model_type, spec.kind) == ("very-own", "decoder")
    assert tasks_of(spec) == (Task.CAUSAL_LM,)
    model = on_cpu(spec, Task.CAUSAL_LM)
    assert model.embedding.weight.shape == (96, 16)
    assert mark.exists()


def test_the_librarys_own_class_is_used_if_the_models_code_is_not_trusted(tmp_path):
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    spec = tiny(tmp_path, "llama", auto_map=classes)
    assert type(on_cpu(spec, Task.CAUSAL_LM)).__name__ == "LlamaForCausalLM"


# Tasks and configs


def test_a_task_without_a_head_is_refused_with_those_there_are():
    with pytest.raises(InputError, match=r"'t5' has no head for image-classification .*seq2seq-lm"):
        build_config(resolve("t5-small"), Task.IMAGE_CLASSIFICATION)


def test_the_tasks_of_a_type_are_the_heads_it_has():
    assert set(tasks_of(resolve("bert-base-uncased"))) == {
        Task.CAUSAL_LM,
        Task.MASKED_LM,
        Task.SEQUENCE_CLASSIFICATION,
    }
    assert tasks_of(resolve("resnet-50")) == (Task.IMAGE_CLASSIFICATION,)


@pytest.mark.parametrize(("name", "labels"), [("bert-base-uncased", 2), ("bart-base", 2), ("llama-2-7b", 2)])
def test_sequence_classification_has_two_labels_unless_told_otherwise(name, labels):
    assert build_config(resolve(name), Task.SEQUENCE_CLASSIFICATION).num_labels == labels


def test_labels_of_a_local_model_are_kept(tmp_path):
    labels = {"0": "bad", "1": "fair", "2": "good"}
    spec = tiny(tmp_path, "bert", id2label=labels)
    assert build_config(spec, Task.SEQUENCE_CLASSIFICATION).num_labels == 3
    assert build_config(tiny(tmp_path, "vit"), Task.IMAGE_CLASSIFICATION).num_labels == 3
    assert build_config(resolve("vit-base"), Task.IMAGE_CLASSIFICATION).num_labels == 1000


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "falcon-7b", "qwen2.5-0.5b"])
def test_a_decoder_that_classifies_knows_what_padding_is(name):
    config = build_config(resolve(name), Task.SEQUENCE_CLASSIFICATION)
    assert 0 <= config.pad_token_id < config.vocab_size


def test_an_encoder_that_generates_is_a_decoder(tmp_path):
    assert build_config(tiny(tmp_path, "bert"), Task.CAUSAL_LM).is_decoder


# Building


def batch_for(task, config):
    import torch

    generator = torch.Generator().manual_seed(0)
    if task is Task.IMAGE_CLASSIFICATION:
        pixels = torch.randn(2, 3, config.image_size, config.image_size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    tokens = torch.randint(3, config.vocab_size, (2, 12), generator=generator)
    if task.takes_audio:
        name, shape = audio_input(config, 40)
        return {name: torch.randn(2, *shape, generator=generator), "labels": tokens[:, :8]}
    labels = torch.tensor([0, 1]) if task is Task.SEQUENCE_CLASSIFICATION else tokens
    return {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize("name", ["llama", "mixtral", "mamba", "bert", "roberta", "t5", "vit", "wav2vec2", "whisper"])
def test_a_built_model_trains(tmp_path, name):
    import torch

    spec = tiny(tmp_path, name)
    task = default_task(spec)
    model = on_cpu(spec, task)
    assert model.training
    loss = model(**batch_for(task, model.config)).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("task", [Task.SEQUENCE_CLASSIFICATION, Task.CAUSAL_LM])
@pytest.mark.parametrize("name", ["llama", "mixtral", "bert"])
def test_another_head_than_the_usual_trains_too(tmp_path, name, task):
    import torch

    model = on_cpu(tiny(tmp_path, name), task)
    assert torch.isfinite(model(**batch_for(task, model.config)).loss)


def test_equal_seeds_give_equal_weights(tmp_path):
    import torch

    spec = tiny(tmp_path, "llama")
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(on_cpu(spec, Task.CAUSAL_LM).lm_head.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("name", ["llama", "mixtral", "mamba", "bert", "t5", "vit"])
def test_building_on_the_device_gives_what_the_library_builds(tmp_path, name):
    import torch
    import transformers

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


def test_weights_have_the_dtype_asked_for(tmp_path):
    import torch

    model = on_cpu(tiny(tmp_path, "llama"), Task.CAUSAL_LM, dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_the_attention_asked_for_is_the_one_built(tmp_path):
    model = on_cpu(tiny(tmp_path, "llama"), Task.CAUSAL_LM, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float33"}, "'float33' is not a torch dtype"),
        ({"attn_implementation": "flash_attention_9"}, "can't be built"),
        ({"attn_implementation": "flex_attention"}, "can't be built: MambaForCausalLM does not support"),
    ],
)
def test_what_the_library_refuses_is_told_on_one_line(tmp_path, options, words):
    with pytest.raises(InputError, match=words) as refusal:
        on_cpu(tiny(tmp_path, "mamba"), Task.CAUSAL_LM, **options)
    assert "\n" not in str(refusal.value)


def test_running_out_of_memory_is_not_mistaken_for_bad_input(tmp_path):
    spec = tiny(tmp_path, "llama", vocab_size=2**44)
    with pytest.raises(RuntimeError, match="memory"):
        on_cpu(spec, Task.CAUSAL_LM)


def test_output_weights_apart_in_the_config_are_apart_in_the_model(tmp_path):
    import torch
    from transformers import AutoModelForSeq2SeqLM

    spec = tiny(tmp_path, "t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    model = on_cpu(spec, Task.SEQ2SEQ_LM)
    assert model.lm_head.weight is not model.shared.weight
    # A checkpoint of such a model, loaded by the library, has the same parameters.
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert loaded.num_parameters() == model.num_parameters()
    assert describe(spec, Task.SEQ2SEQ_LM).parameters == model.num_parameters()


def test_output_weights_tied_in_the_config_are_tied_in_the_model(tmp_path):
    model = on_cpu(tiny(tmp_path, "t5", tie_word_embeddings=True), Task.SEQ2SEQ_LM)
    assert model.lm_head.weight is model.shared.weight


# What the classes offer

FLASH = {"flash_attention_2", "flash_attention_3"}


def facts(name, task=None, **changes):
    spec = resolve(name)
    spec = spec.model_copy(update={"config": {**spec.config, **changes}})
    return describe(spec, task or default_task(spec))


def test_facts_of_a_decoder():
    llama = facts("llama-2-7b")
    assert llama.attn_implementations[0] == "sdpa"
    assert {"eager", "flex_attention"} | FLASH <= set(llama.attn_implementations)
    assert llama.supports_checkpointing
    assert llama.batch_coupled is None
    assert not llama.has_dropout
    assert (llama.max_sequence_length, llama.vocab_size) == (4096, 32000)
    assert llama.linear_modules == (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )


def test_facts_of_gpt2_name_its_conv1d_layers():
    gpt2 = facts("gpt2")
    assert set(gpt2.linear_modules) == {"c_attn", "c_proj", "c_fc"}
    assert gpt2.has_dropout
    assert gpt2.max_sequence_length == 1024


def test_facts_of_an_encoder():
    bert = facts("bert-base-uncased")
    assert bert.task is Task.SEQUENCE_CLASSIFICATION
    assert bert.has_dropout
    assert bert.max_sequence_length == 512
    assert "classifier" not in bert.linear_modules


def test_facts_of_t5_know_no_limit_of_length():
    t5 = facts("t5-small")
    assert t5.max_sequence_length is None
    assert not FLASH & set(t5.attn_implementations)
    assert set(t5.linear_modules) == {"q", "k", "v", "o", "wi", "wo"}


def test_positions_that_padding_takes_are_not_offered(tmp_path):
    import torch

    spec = tiny(tmp_path, "roberta")
    task = default_task(spec)
    longest = describe(spec, task).max_sequence_length
    assert longest == 64
    model = on_cpu(spec, task)
    model(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))


def test_facts_of_a_mixture_of_experts():
    mixtral = facts("mixtral-8x7b")
    assert mixtral.batch_coupled is None
    assert mixtral.linear_modules == ("q_proj", "k_proj", "v_proj", "o_proj")


def test_a_router_loss_couples_the_batch_where_it_is_part_of_the_loss():
    assert "router loss" in facts("mixtral-8x7b", output_router_logits=True).batch_coupled
    assert facts("mixtral-8x7b", output_router_logits=True, router_aux_loss_coef=0.0).batch_coupled is None
    # Switch adds it only if the call asks for it, whatever the config says.
    coupled = facts("switch-base-8", output_router_logits=True).batch_coupled
    assert coupled is None or "expert capacity" in coupled


def test_batch_norm_couples_the_batch():
    resnet = facts("resnet-50")
    assert "batch norm" in resnet.batch_coupled
    assert resnet.attn_implementations == ()
    assert not resnet.supports_checkpointing
    assert (resnet.max_sequence_length, resnet.vocab_size) == (None, None)
    assert resnet.linear_modules == ()


def test_facts_of_a_vision_transformer():
    vit = facts("vit-base")
    assert "sdpa" in vit.attn_implementations
    assert not vit.has_dropout
    assert vit.max_sequence_length is None
    assert "classifier" not in vit.linear_modules


def test_facts_of_speech_models():
    whisper = facts("whisper-tiny")
    assert (whisper.max_sequence_length, whisper.max_target_length, whisper.vocab_size) == (None, 448, None)
    assert not whisper.has_dropout
    assert facts("wav2vec2-base").has_dropout
    assert tasks_of(resolve("wav2vec2-base")) == (Task.SPEECH_CTC, Task.AUDIO_CLASSIFICATION)
    assert tasks_of(resolve("whisper-tiny")) == (Task.SPEECH_SEQ2SEQ, Task.AUDIO_CLASSIFICATION)


def test_hidden_parts_of_a_recording_are_random_as_dropout_is(tmp_path):
    still = without_dropout({**TINY["wav2vec2"], **dict.fromkeys(NO_DROPOUT, 0.0)})
    silent = describe(resolve(str(write_model(tmp_path / "still", {**still, "mask_time_prob": 0.0}))), Task.SPEECH_CTC)
    hiding = describe(resolve(str(write_model(tmp_path / "hiding", {**still, "mask_time_prob": 0.1}))), Task.SPEECH_CTC)
    assert (silent.has_dropout, hiding.has_dropout) == (False, True)


def test_no_parameter_is_left_on_another_device(tmp_path):
    spec = tiny(tmp_path, "wav2vec2")
    model = build_model(spec, Task.SPEECH_CTC, dtype="float32", attn_implementation=None, device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["mamba-130m", "convnext-tiny"])
def test_a_model_without_attention_has_no_attention_kernels(name):
    assert facts(name).attn_implementations == ()


@pytest.mark.parametrize("name", ["bloom-560m", "deberta-v3-base"])
def test_a_class_without_flags_has_eager_attention(name):
    assert facts(name).attn_implementations == ("eager",)


@pytest.mark.parametrize("name", ["t5-small", "gpt2", "bert-base-uncased", "bart-base", "opt-125m", "swin-tiny"])
def test_dropout_is_found_and_its_absence_too(name):
    assert facts(name).has_dropout
    assert not facts(name, **without_dropout(resolve(name).config)).has_dropout


def test_another_heads_dropout_does_not_count():
    assert not facts("albert-base-v2", Task.MASKED_LM).has_dropout
    assert facts("albert-base-v2", Task.SEQUENCE_CLASSIFICATION).has_dropout


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "vit"])
def test_the_kernels_named_can_be_built(tmp_path, name):
    spec = tiny(tmp_path, name)
    task = default_task(spec)
    kernels = describe(spec, task).attn_implementations
    assert on_cpu(spec, task).config._attn_implementation == kernels[0]
    for kernel in set(kernels) - FLASH:
        with contextlib.suppress(ImportError):
            assert on_cpu(spec, task, attn_implementation=kernel).config._attn_implementation == kernel
