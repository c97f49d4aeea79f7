"""Exports to other tools: what each says of an answer, and that it says what it can't."""

import ast
import itertools
import json

import pytest
import yaml
from exporting import CPU, answer_with, drafted
from transformers import Trainer, TrainingArguments

from autotune.errors import InputError
from autotune.exports import accelerate_loop, targets
from autotune.exports.winner import DEFAULTS
from autotune.values.model import Task
from autotune.values.optimizers import OPTIMIZERS

SCRIPTS = ("python", "accelerate-loop", "trl")
FILES = ("axolotl", "llama-factory")

# Another value of each knob that a configuration has, apart from those of other devices.
KNOBS = {
    "precision": "bf16",
    "tf32": True,
    "optim": "adamw_bnb_8bit",
    "checkpointing": "every-2nd",
    "attn_implementation": "flash_attention_2",
    "experts_implementation": "grouped_mm",
    "experts_per_token": 1,
    "expert_capacity": 8,
    "use_liger_kernel": True,
    "torch_compile_backend": "inductor",
    "adapter": {"kind": "lora"},
    "dataloader_num_workers": 2,
    "dataloader_pin_memory": True,
    "torch_empty_cache_steps": 4,
    "train_sampling_strategy": "group_by_length",
    "packing": True,
    "micro_batch": 8,
}


def text(draft):
    return "".join(draft.files.values())


@pytest.mark.parametrize(("target", "knob"), list(itertools.product((*SCRIPTS, *FILES), KNOBS)))
def test_no_knob_is_dropped_in_silence(target, knob):
    plain, changed = drafted(target), drafted(target, **{knob: KNOBS[knob]})
    assert text(changed) != text(plain)


@pytest.mark.parametrize("target", [*SCRIPTS, *FILES])
def test_an_argument_of_the_users_own_is_said_or_told(target):
    made = drafted(target, own={"label_smoothing_factor": 0.125})
    assert "label_smoothing_factor" in text(made)
    if target not in ("python", "trl", "llama-factory"):  # whose arguments are TrainingArguments
        assert made.lost == ("your own argument label_smoothing_factor=0.125",)


@pytest.mark.parametrize("target", [*SCRIPTS, *FILES])
def test_a_knob_that_is_one_argument_is_said_or_told(target):
    made = drafted(target, torch_empty_cache_steps=4)
    assert made.lost == (("torch_empty_cache_steps=4",) if target == "accelerate-loop" else ())
    assert "torch_empty_cache_steps" in text(made)


@pytest.mark.parametrize("target", [*SCRIPTS, *FILES])
def test_hyperparameters_of_the_users_own_are_carried_over(target):
    made = drafted(target, own={"learning_rate": 1.5e-3, "max_grad_norm": 0.625})
    assert "0.0015" in text(made)
    assert "0.625" in text(made)
    assert not made.lost


@pytest.mark.parametrize(
    ("target", "knobs", "line"),
    [
        ("axolotl", {"checkpointing": "every-4th"}, "checkpointing every-4th: every layer is checkpointed"),
        ("axolotl", {"precision": "bf16"}, "weights in float32 beside bf16 arithmetic: axolotl loads them in bf16"),
        ("axolotl", {"packing": True}, "packing of a micro-batch: it wants flash_attention_2"),
        ("llama-factory", {"packing": True}, "packing of a micro-batch"),
        ("llama-factory", {"experts_implementation": "batched_mm"}, "experts_implementation batched_mm"),
        ("llama-factory", {"checkpointing": "offload"}, "checkpointing offload"),
        ("accelerate-loop", {"optim": "schedule_free_adamw"}, "optimizer schedule_free_adamw"),
    ],
)
def test_what_a_target_can_not_say_stands_in_its_file_and_in_the_answer(target, knobs, line):
    made = drafted(target, **knobs)
    (told,) = [lost for lost in made.lost if lost.startswith(line)]
    unwrapped = " ".join(text(made).replace("\n#", " ").split())
    assert f"not expressed: {told}" in unwrapped


@pytest.mark.parametrize(
    ("target", "answer", "reason"),
    [
        ("axolotl", {"task": Task.IMAGE_CLASSIFICATION, "kind": "vision"}, "it trains causal-lm, not image-class"),
        ("llama-factory", {"task": Task.SEQ2SEQ_LM, "kind": "encoder-decoder"}, "it trains causal-lm, not seq2seq-lm"),
        ("torchtune", {}, "torchtune is no longer developed; use --to axolotl or --to llama-factory"),
        ("trl", {"task": Task.SEQ2SEQ_LM, "kind": "encoder-decoder"}, "SFTTrainer trains causal-lm"),
        ("axolotl", {"adapter": {"kind": "ia3"}}, "it has no adapter ia3"),
        ("accelerate-loop", {"parallelism": {"world_size": 2, "sharding": "fsdp_full"}}, "fsdp_full was measured with"),
        ("fsdp", {}, "the configuration doesn't use it"),
        ("acelerate", {}, "did you mean 'accelerate'"),
    ],
)
def test_what_can_not_be_trained_there_is_refused(target, answer, reason):
    with pytest.raises(InputError, match=reason):
        drafted(target, **answer)


def test_all_writes_what_can_train_the_answer_and_says_why_others_can_not(tmp_path):
    found, left_out = targets.drafts(answer_with(task=Task.SEQ2SEQ_LM, kind="encoder-decoder"))
    assert set(found) == {"training-args", "python", "accelerate", "accelerate-loop", "dockerfile"}
    assert set(found) | set(left_out) == set(targets.TARGETS)


def test_from_python_it_is_the_same(tmp_path):
    exported = answer_with(checkpointing="every-2nd").export("axolotl", tmp_path / "new")
    assert [path.name for path in exported.paths] == ["axolotl.yaml"]
    assert exported.launch == ("axolotl train axolotl.yaml",)
    assert exported.not_expressed == ("checkpointing every-2nd: every layer is checkpointed",)
    everything = answer_with(checkpointing="every-2nd").export("all", tmp_path / "new")
    assert "axolotl: checkpointing every-2nd: every layer is checkpointed" in everything.not_expressed
    assert (tmp_path / "new/launch.txt").read_text() == "python train.py\n"


def test_defaults_that_are_written_out_are_those_of_the_trainer(tmp_path):
    assert {name: getattr(TrainingArguments(str(tmp_path), use_cpu=True), name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("name", accelerate_loop.NAMES)
def test_a_loop_makes_the_optimizer_that_the_trainer_makes(name, tmp_path):
    package = OPTIMIZERS[name].package
    if package is not None:
        pytest.importorskip(package)
    own = {"learning_rate": 1e-3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-7}
    arguments = TrainingArguments(str(tmp_path), optim=name, use_cpu=True, **own)
    kind, told = Trainer.get_optimizer_cls_and_kwargs(arguments)
    made = accelerate_loop.made(name, lambda hyperparameter: getattr(arguments, hyperparameter))
    assert made.name == kind.__name__
    assert made.arguments == told


@pytest.mark.parametrize("target", SCRIPTS)
@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"adapter": {"kind": "lora"}, "quantization": "nf4", "precision": "bf16"},
        {"adapter": {"kind": "bitfit"}},
        {"adapter": {"kind": "p-tuning"}},
        {"parallelism": {"world_size": 2}, "torch_compile_backend": "inductor", "torch_compile_mode": "max-autotune"},
        {
            "name": 'weird"name\\',
            "optim": "adamw_bnb_8bit",
            "own": {"warmup_steps": 0.1, "lr_scheduler_type": "cosine"},
        },
        {"hardware": CPU, "train_sampling_strategy": "group_by_length", "dataloader_num_workers": 2},
    ],
    ids=["plain", "qlora", "bitfit", "p-tuning", "ddp", "names", "cpu"],
)
def test_scripts_are_python_that_needs_no_autotune(target, answer):
    (source,) = drafted(target, **answer).files.values()
    tree = ast.parse(source)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.startswith("autotune")]
    assert max(map(len, source.splitlines())) <= 120


def test_trls_own_defaults_are_overruled():
    (source,) = drafted("trl").files.values()
    tree = ast.parse(source)
    told = {n.targets[0].id: n.value for n in tree.body if isinstance(n, ast.Assign)}
    arguments = ast.literal_eval(told["SFT_ARGUMENTS"])
    assert arguments["activation_checkpointing"] is False
    assert arguments["bf16"] is False
    assert arguments["learning_rate"] == 5e-5
    assert arguments["loss_type"] == "nll"
    assert arguments["max_length"] == 128


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("axolotl", "axolotl train axolotl.yaml --launcher torchrun -- --nproc_per_node 2"),
        ("llama-factory", "FORCE_TORCHRUN=1 NPROC_PER_NODE=2 llamafactory-cli train llama_factory.yaml"),
    ],
)
def test_several_devices_are_started_by_each_tools_own_launcher(target, line):
    made = drafted(target, parallelism={"world_size": 2, "ddp_bucket_cap_mb": 50})
    assert made.launch == (line,)
    assert yaml.safe_load(next(iter(made.files.values())))["ddp_bucket_cap_mb"] == 50


def test_deepspeeds_file_lies_beside_the_one_that_names_it():
    for target in ("axolotl", "llama-factory"):
        files = drafted(target, parallelism={"world_size": 2, "sharding": "zero_3"}).files
        (named,) = [name for name in files if name.endswith(".json")]
        assert yaml.safe_load(files[next(iter(files))])["deepspeed"] == named == "deepspeed.json"


def test_a_single_gpu_is_the_only_one_that_a_script_sees():
    assert drafted("python").launch == ("CUDA_VISIBLE_DEVICES=0 python train.py",)
    assert drafted("python", hardware=CPU).launch == ("python train.py",)
    several = drafted("accelerate-loop", parallelism={"world_size": 2}).launch
    assert several == ("OMP_NUM_THREADS=4 torchrun --standalone --nproc_per_node 2 accelerate_loop.py",)


def test_an_image_has_the_versions_that_measured():
    files = drafted("dockerfile", adapter={"kind": "lora"}, attn_implementation="flash_attention_2").files
    assert "torch==2.13.0\ntransformers==5.23.0\n" in files["requirements.txt"]
    assert "flash-attn==2.8.0\n" in files["requirements.txt"]
    assert 'ENTRYPOINT ["python", "train.py"]' in files["Dockerfile"]
    assert "g++" not in files["Dockerfile"]
    service = yaml.safe_load(files["compose.yaml"])["services"]["train"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["count"], device["driver"]) == (1, "nvidia")
    assert "train.py" in files


def test_an_image_of_ranks_is_started_by_torchrun():
    files = drafted("dockerfile", parallelism={"world_size": 2}, torch_compile_backend="inductor").files
    entry = files["Dockerfile"].splitlines()[-1].removeprefix("ENTRYPOINT ")
    assert json.loads(entry) == ["torchrun", "--standalone", "--nproc_per_node", "2", "train.py"]
    assert "ENV OMP_NUM_THREADS=4\n" in files["Dockerfile"]
    assert "g++" in files["Dockerfile"]
    assert yaml.safe_load(files["compose.yaml"])["services"]["train"]["ipc"] == "host"


def test_an_image_for_a_cpu_asks_for_no_gpu():
    versions = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
    files = drafted("dockerfile", hardware=CPU.model_copy(update={"versions": versions})).files
    assert "deploy" not in yaml.safe_load(files["compose.yaml"])["services"]["train"]
    assert "--extra-index-url https://download.pytorch.org/whl/cpu\ntorch==2.13.0+cpu\n" in files["requirements.txt"]
