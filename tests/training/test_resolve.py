"""The catalogue's figures, and how a name becomes a model."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import write_model
from huggingface_hub import constants
from tiny_models import TINY, on_cpu, tiny
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autotune.errors import InputError, UnknownModelError
from autotune.training.build import build_config, describe
from autotune.training.resolve import check_task, default_task, remote_classes, resolve, tasks_for
from autotune.values.catalogue import catalogue
from autotune.values.model import Task


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("the network is not to be used here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def hub_cache(monkeypatch, tmp_path):
    """An empty cache of the hub's files."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def hub(monkeypatch, hub_cache):
    """A hub on this machine that answers for one model, one gated model and nothing else."""
    body = json.dumps(TINY["llama"]).encode()

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            repository, _, file = self.path.strip("/").partition("/resolve/main/")
            is_there = repository == "some/llama" and file.startswith("config.json")
            error = {"some/gated": "GatedRepo", "some/weights": "EntryNotFound"}.get(repository, "RepoNotFound")
            self.send_response(200 if is_there else 403 if error == "GatedRepo" else 404)
            told = {"X-Repo-Commit": "a" * 40, "ETag": '"etag"'} if is_there else {"X-Error-Code": error}
            for name, value in {**told, "Content-Length": str(len(body) if is_there else 0)}.items():
                self.send_header(name, value)
            self.end_headers()
            if is_there and self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

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


# One of those that share their figures. Every tenth in each test run, all with `pytest -m "slow or not slow"`.
ENTRIES = [
    pytest.param(entry, id=entry.id, marks=[pytest.mark.slow] if number % 10 else [])
    for number, entry in enumerate({id(entry.config): entry for entry in reversed(catalogue())}.values())
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


def test_every_entry_has_a_head_for_its_usual_task_or_is_refused_by_the_version_of_transformers():
    specs = [resolve(entry.names[0]) for entry in catalogue()]
    known = [spec for spec in specs if spec.model_type in CONFIG_MAPPING]
    for spec in known:
        check_task(spec, default_task(spec))
    assert len(known) > len(specs) / 2
    spec = resolve("gpt2").model_copy(update={"model_type": "of-tomorrow"})
    with pytest.raises(InputError, match=r"transformers \d.* has no models of type 'of-tomorrow'; a newer version may"):
        check_task(spec, default_task(spec))


def test_the_catalogue_is_wide_no_name_means_two_models_and_every_entry_says_where_its_figures_stand():
    assert len(catalogue()) > len(ENTRIES) >= 445
    kinds = {"decoder", "encoder", "encoder-decoder", "vision", "vision-language", "speech", "speech-to-text"}
    assert {entry.kind for entry in catalogue()} == kinds
    families = {"bert", "llama", "t5", "mixtral", "switch", "resnet", "mamba", "wav2vec2", "whisper"}
    assert families <= {entry.family for entry in catalogue()}
    names = [name.lower() for entry in catalogue() for name in {entry.id, *entry.names}]
    assert len(names) == len(set(names))
    for entry in catalogue():
        assert entry.source == f"https://huggingface.co/{entry.id}/blob/main/config.json"
        assert entry.quoted_in is None or re.fullmatch(r"[\w.-]+/[\w.-]+@(v5\.23\.0|[0-9a-f]{40}):\S+", entry.quoted_in)


def test_a_checkpoint_with_the_figures_of_another_has_its_own_name():
    base, chat = resolve("Qwen/Qwen1.5-4B"), resolve("qwen1.5-4b-chat")
    assert (chat.name, base.name) == ("Qwen/Qwen1.5-4B-Chat", "Qwen/Qwen1.5-4B")
    assert chat.config == base.config


@pytest.mark.parametrize(
    "reference", ["t5-small", "T5-Small", "google-t5/t5-small", "GOOGLE-T5/t5-small", " t5-small "]
)
def test_a_catalogue_name_in_any_case_leads_to_its_full_id(reference):
    spec = resolve(reference)
    assert (spec.name, spec.source, spec.model_type) == ("google-t5/t5-small", "catalogue", "t5")
    assert spec.reference == reference


@pytest.mark.usefixtures("no_network")
def test_a_catalogue_name_touches_no_network_and_changing_a_spec_leaves_the_catalogue_alone():
    spec = resolve("meta-llama/Llama-3.1-8B")
    assert describe(spec, default_task(spec)).parameters == 8_030_261_248
    resolve("llama-2-7b").config["rope_parameters"]["rope_theta"] = 1.0
    assert resolve("llama-2-7b").config["rope_parameters"]["rope_theta"] == 10000.0


def test_the_catalogue_can_be_searched_without_torch():
    code = (
        "import sys; from autotune.training.resolve import resolve; resolve('t5-small');"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.usefixtures("no_network", "hub_cache")
def test_an_unknown_name_is_refused_at_once_with_the_nearest_ones(monkeypatch):
    waits_s = []
    monkeypatch.setattr(time, "sleep", waits_s.append)
    with pytest.raises(UnknownModelError) as refusal:
        resolve("t5-smal")
    assert waits_s == []  # a download would ask again and again
    message = str(refusal.value)
    assert message.startswith("model 't5-smal' is unknown: not in the catalogue (did you mean 't5-small'")
    assert "not a directory, not cached, and the hub does not answer" in message
    assert message.endswith("`autotune models` lists the catalogue")
    assert "\n" not in message


@pytest.mark.usefixtures("no_network", "hub_cache")
@pytest.mark.parametrize(
    "reference",
    ["a/b/c", "./no/such/directory", "../up", "two words", "line\nbreak", "nul\0byte", "~nobody/model", "x" * 9999],
)
def test_a_name_that_can_be_no_hub_id_is_refused_on_one_line(reference):
    with pytest.raises(UnknownModelError, match="and no hub id") as refusal:
        resolve(reference)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


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
@pytest.mark.parametrize(
    ("reference", "error", "words"),
    [
        ("some/other", UnknownModelError, "the hub has no such model"),
        ("some/gated", InputError, "access is gated"),
        ("some/weights", InputError, "has no config.json"),
    ],
)
def test_a_hub_id_is_fetched_unless_offline_and_the_hubs_refusals_are_told_apart(reference, error, words, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnknownModelError, match="not cached, and HF_HUB_OFFLINE is set"):
        resolve("some/llama")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(error, match=words):
        resolve(reference)
    spec = resolve("some/llama")
    assert (spec.source, spec.model_type, spec.config["hidden_size"]) == ("hub", "llama", 32)


@pytest.mark.parametrize(
    "name", ["plain", "two words", 'quote\'s "and" more', "[red]markup", "ünïcode-模型", "%s {x}", "-dash", "new\nline"]
)
def test_a_directory_is_a_model_whatever_its_name(tmp_path, name):
    folder = write_model(tmp_path / name, TINY["llama"])
    spec = resolve(f"{folder}/")  # the slash is no part of its name
    assert (spec.name, spec.source, spec.path) == (name, "directory", str(folder))
    assert describe(spec, default_task(spec)).layers == TINY["llama"]["num_hidden_layers"]


def test_a_directory_named_like_a_catalogue_model_is_reached_by_its_path(tmp_path, monkeypatch):
    write_model(tmp_path / "gpt2", TINY["bert"])
    monkeypatch.chdir(tmp_path)
    assert (resolve("gpt2").source, resolve("./gpt2").model_type) == ("catalogue", "bert")


def test_an_architecture_is_known_by_its_figures_whatever_it_is_called(tmp_path):
    def digest(folder: str, **figures) -> str | None:
        spec = resolve(str(write_model(tmp_path / folder, {**TINY["llama"], **figures})))
        return describe(spec, Task.CAUSAL_LM).architecture

    usual = digest("one")
    assert usual is not None
    assert digest("two", transformers_version="4.1", _name_or_path="x/y", dtype="float16", label2id={"a": 0, "b": 1},
                  id2label={"0": "a", "1": "b"}) == usual  # fmt: skip
    assert digest("three", hidden_act="gelu") != usual  # as many parameters, another model


@pytest.mark.parametrize(
    ("name", "kind", "task"),
    [
        ("llama", "decoder", Task.CAUSAL_LM), ("mixtral", "decoder", Task.CAUSAL_LM),
        ("mamba", "decoder", Task.CAUSAL_LM), ("bert", "encoder", Task.SEQUENCE_CLASSIFICATION),
        ("roberta", "encoder", Task.SEQUENCE_CLASSIFICATION), ("t5", "encoder-decoder", Task.SEQ2SEQ_LM),
        ("vit", "vision", Task.IMAGE_CLASSIFICATION), ("wav2vec2", "speech", Task.SPEECH_CTC),
        ("whisper", "speech-to-text", Task.SPEECH_SEQ2SEQ),
    ],
)  # fmt: skip
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
        ("", "not valid JSON"), (b"\xff\xfe\x00", "not valid JSON"), ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"), ("[]", "must hold a JSON object, not a list"), ("{}", "lacks model_type"),
        ({"model_type": None}, "lacks model_type"), ({"model_type": 3}, "lacks model_type"),
        ({"model_type": "lama"}, "model type 'lama' is unknown to transformers .* \\(did you mean 'llama'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "transformers refuses its config: .*hidden_size"),
        ({"model_type": "pop2piano", "is_encoder_decoder": True}, "no head that can be trained here"),
        ({**TINY["llama"], "quantization_config": {"quant_method": "gptq"}}, "quantized already \\(gptq\\)"),
        ({**TINY["llama"], "quantization": {"bits": 4}}, "quantized already \\(MLX\\)"),
        ({"model_type": "gemma3", "text_config": {"quantization_config": {"quant_method": "x"}}}, "already \\(x\\)"),
    ],
)  # fmt: skip
def test_a_malformed_config_is_refused_on_one_line(tmp_path, config, words):
    folder = write_model(tmp_path / "mine", config)
    with pytest.raises(InputError, match=words) as refusal:
        resolve(str(folder))
    assert "mine" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_path_that_is_no_models_directory_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    for packed in ("quantize_config.json", "hf_quant_config.json"):
        (write_model(tmp_path / packed[:2], TINY["llama"]) / packed).write_text("{}")
    for reference, words in (
        (tmp_path / "qu", r"are quantized already \(AutoGPTQ\)"),
        (tmp_path / "hf", r"are quantized already \(ModelOpt\)"),
        (tmp_path / "adapter", "holds an adapter of the model gpt2; name that model"),
        (write_model(tmp_path / "model", TINY["llama"]) / "config.json", "is a file; give the directory"),
        (tmp_path / "empty", r"not the directory of a model, it has no config\.json"),
        *((unnamed, "name is empty") for unnamed in ("", "   ")),
    ):
        with pytest.raises(InputError, match=words):
            resolve(str(reference))


OWN_CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel


class OwnConfig(PretrainedConfig):
    model_type = "very-own"

    def __init__(self, width=8, **kwargs):
        self.width = width
        super().__init__(**kwargs)


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(96, config.width)
        self.post_init()
"""


def test_code_that_comes_with_a_model_runs_only_if_it_is_trusted(tmp_path, monkeypatch):
    """Its classes lie beside its config, and reading them makes a file."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    folder = write_model(tmp_path / "own", {"model_type": "very-own", "auto_map": classes, "width": 16})
    mark = tmp_path / "code-has-run"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\n{OWN_CODE}")
    with pytest.raises(InputError, match="runs only with --trust-remote-code"):
        resolve(str(folder))
    assert not mark.exists()
    spec = resolve(str(folder), trust_remote_code=True)
    assert (spec.model_type, spec.kind) == ("very-own", "decoder")
    assert tasks_for(spec.model_type, remote_classes(spec)) == (Task.CAUSAL_LM,)
    assert on_cpu(spec, Task.CAUSAL_LM).embedding.weight.shape == (96, 16)
    assert mark.exists()


def test_the_librarys_own_class_is_used_if_the_models_code_is_not_trusted(tmp_path):
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    spec = tiny(tmp_path, "llama", auto_map=classes)
    assert type(on_cpu(spec, Task.CAUSAL_LM)).__name__ == "LlamaForCausalLM"


def test_a_model_whose_class_may_have_experts_has_none(tmp_path):
    figures = {"model_type": "granitemoehybrid", "hidden_size": 64, "num_local_experts": 0, "num_experts_per_tok": 0}
    assert tiny(tmp_path, "llama", **figures).kind == "decoder"
