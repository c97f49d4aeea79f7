"""Exported scripts run as they are, in this process, on tiny checkpoints: they train, and they train what was measured.

Their stand-in samples are replaced by uneven ones where losses are compared, since labels of equal number hide a loss
that is weighted wrongly. Learning rate and weight decay are large, so that each step tells of those before it.
"""

import ast
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from conftest import write_model
from corpora import jsonl, save_tokenizer
from exporting import ANSWERS, CPU, SCRIPTS, answer_of, answer_with, constant, drafted
from factories import make_config, make_gpu, make_hardware, make_workload
from optimizer_steps import BART, BERT, GPT2, LLAMA, MIXTRAL, T5, WAV2VEC2, WHISPER
from own_trainings import LLAMA_SCRIPT
from tiny_models import TINY
from transformers import Trainer, default_data_collator, set_seed
from vision_language import tiny_vision_language, with_images

from autotune.errors import InputError
from autotune.exports.targets import draft
from autotune.training import recipes
from autotune.training.arguments import training_plan
from autotune.training.build import build_model
from autotune.training.facts import facts_of
from autotune.training.resolve import HEADS, resolve
from autotune.values.config import Parallelism
from autotune.values.hardware import installed_versions
from autotune.values.model import Task
from autotune.values.workload import RECIPES, Recipe

MODELS = {
    "llama": LLAMA, "gpt2": {"model_type": "gpt2", **GPT2}, "t5": T5, "bert": BERT,
    "bart": {"model_type": "bart", **BART},
    "xlnet": {"model_type": "xlnet", "vocab_size": 99, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32},
    "vit": TINY["vit"], "wav2vec2": {**WAV2VEC2, "apply_spec_augment": False, "ctc_zero_infinity": True},
    "whisper": WHISPER, "mixtral": {"model_type": "mixtral", **MIXTRAL, "router_aux_loss_coef": 1.0},
}  # fmt: skip

STEPS = 3
OWN = {"learning_rate": 0.02, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 1}


HERE = make_hardware(versions=installed_versions())


@pytest.fixture
def answer(tmp_path):
    """Return a function that makes the answer for a tiny model, whose checkpoint lies where the answer has it."""

    def made(model, task, own=OWN, **knobs):
        folder = write_model(tmp_path / model, MODELS[model])
        spec = resolve(str(folder))
        set_seed(1)
        built = build_model(spec, task, dtype="float32", device="cpu")
        built.save_pretrained(folder)
        sizes = {"sequence_length": 12, "target_length": 8, "global_batch_size": 8}
        workload = make_workload(model=spec, task=task, fixed_arguments=own, **sizes)
        config = make_config(2, **{"train_sampling_strategy": "sequential", **knobs})
        return answer_of(config, workload=workload, hardware=HERE, facts=facts_of(built, task))

    return made


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs an exported script and reads its last line."""

    def ran(result, target, data=None):
        made = draft(result, target)
        path = tmp_path / made.name
        path.write_text(made.text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        script.training_data = data or script.training_data
        place = [] if target == "accelerate-loop" else ["--output-dir", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", [made.name, "--steps", str(STEPS), *place])
        script.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return ran


def uneven(task):
    """Return a function that makes samples with 2 to 8 labels each."""

    def data(config, count):
        random = torch.Generator().manual_seed(5)
        ids = torch.randint(8, 90, (count, 12), generator=random)
        targets = ids if task is not Task.SEQ2SEQ_LM else torch.randint(8, 90, (count, 8), generator=random)
        positions = torch.arange(targets.shape[1])
        labels = [torch.where(positions < 2 + (3 * n) % 7, row, -100) for n, row in enumerate(targets)]
        return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]

    return data


def pretrained(result):
    head = getattr(transformers, HEADS[result.workload.task][0])
    return head.from_pretrained(result.workload.model.path, **result.model_kwargs())


def reference(result, data, output):
    """Return the loss of the Trainer that trials run."""
    model = result.prepare_model(pretrained(result))
    arguments = result.training_arguments(output, max_steps=STEPS, report_to="none")
    given = {"train_dataset": data(model.config, STEPS * 8), "data_collator": default_data_collator}
    loss = Trainer(model=model, args=arguments, **given).train().training_loss
    AcceleratorState._reset_state(reset_partial_state=True)
    return loss


@pytest.mark.parametrize(
    ("model", "task", "own", "knobs"),
    [
        ("t5", Task.SEQ2SEQ_LM, {}, {}),
        ("t5", Task.SEQ2SEQ_LM, {}, {"precision": "pure_bf16"}),  # whose loss has three digits
        ("bart", Task.CAUSAL_LM, {}, {}),  # whose loss counts the first label of a row too
        pytest.param("gpt2", Task.CAUSAL_LM, {}, {}, marks=pytest.mark.slow),
        pytest.param("llama", Task.CAUSAL_LM, {}, {}, marks=pytest.mark.slow),
        ("llama", Task.CAUSAL_LM, {"label_smoothing_factor": 0.9}, {}),  # which a loop doesn't
    ],
)
def test_scripts_do_the_step_that_was_measured(answer, run, model, task, own, knobs, tmp_path):
    result, data = answer(model, task, own=OWN | own, **knobs), uneven(task)
    measured = reference(result, data, tmp_path / "reference")
    for target in ("python",) if own else ("python", "accelerate-loop"):
        assert run(result, target, data)["loss"] == pytest.approx(measured, rel=1e-5)


@pytest.mark.parametrize("model", ["xlnet", "mixtral"])  # without a count of labels, and a routers' loss unasked for
def test_trls_script_has_the_loss_that_was_measured(answer, run, model):
    pytest.importorskip("trl")
    result = answer(model, Task.CAUSAL_LM, attn_implementation="eager")
    save_tokenizer(result.workload.model.path, ["[UNK]", "[PAD]"], "[UNK]", pad_token="[PAD]", eos_token="[UNK]")
    assert run(result, "trl")["loss"] == pytest.approx(run(result, "python")["loss"], rel=1e-4)


@pytest.mark.parametrize(("averages", "loss"), [(True, 2.0), (False, 1.0)])
def test_a_loss_is_that_of_all_processes_where_the_trainer_makes_it_so(answer, averages, loss):
    result = answer("t5", Task.SEQ2SEQ_LM, parallelism={"world_size": 2})
    script = {"__name__": "script"}
    exec(draft(result, "python").text, script)
    own = {"average_tokens_across_devices": averages}
    trainer = SimpleNamespace(args=SimpleNamespace(**own), accelerator=SimpleNamespace(num_processes=2))
    inputs, one = {"labels": torch.ones(1, 4, dtype=torch.long)}, torch.ones(())
    compute_loss = script["StepLossTrainer"].compute_loss
    assert compute_loss(trainer, lambda labels: {"loss": one}, inputs, num_items_in_batch=4) == loss


@pytest.mark.parametrize(("model", "task"), [("t5", Task.SEQ2SEQ_LM), ("whisper", Task.SPEECH_SEQ2SEQ)])
def test_a_decoder_has_inputs_where_the_trainer_smooths_labels(answer, run, model, task):
    smoothed = answer(model, task, own={**OWN, "label_smoothing_factor": 0.1})
    assert run(smoothed, "python")["loss"] > 0
    assert "decoder_input_ids" not in draft(smoothed, "accelerate-loop").text  # it doesn't smooth


@pytest.mark.slow
@pytest.mark.parametrize("target", ["python", "accelerate-loop"])
@pytest.mark.parametrize(
    ("model", "task"),
    [
        *(("bert", task) for task in (Task.MASKED_LM, Task.SEQUENCE_CLASSIFICATION)),
        ("gpt2", Task.SEQUENCE_CLASSIFICATION),
        ("vit", Task.IMAGE_CLASSIFICATION),
        *(("wav2vec2", task) for task in (Task.SPEECH_CTC, Task.AUDIO_CLASSIFICATION)),
        ("whisper", Task.SPEECH_SEQ2SEQ),
    ],
)
def test_every_task_trains_on_its_stand_ins(answer, run, target, model, task):
    printed = run(answer(model, task), target)
    assert printed["samples_per_second"] > 0
    assert 0 < printed["loss"] < 1000  # of CTC a sum over labels
    assert printed["measured_by_autotune"] == 20.0


SLOWLY = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "paligemma", "gemma3", "smolvlm", "internvl")


@pytest.mark.parametrize("target", ["python", "accelerate-loop"])
@pytest.mark.parametrize("model", ["idefics3", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWLY)])
def test_vision_language_models_train_on_texts_with_images(run, tmp_path, target, model):
    spec = tiny_vision_language(tmp_path / model, model).model_copy(update={"freeze_vision": True})
    build_model(spec, Task.IMAGE_TEXT_TO_TEXT, dtype="float32", device="cpu").save_pretrained(tmp_path / model)
    workload = with_images(spec, model, images=2, words=8, global_batch_size=4)
    config = make_config(2, adapter={"kind": "lora", "rank": 2})
    printed = run(answer_of(config, workload=workload, hardware=HERE), target)
    assert printed["samples_per_second"] > 0
    assert 0 < printed["loss"] < 20


KNOBS = {
    "bf16": {"precision": "bf16"}, "pure-bf16": {"precision": "pure_bf16"}, "checkpointing": {"checkpointing": "full"},
    "every-2nd": {"checkpointing": "every-2nd"}, "adafactor": {"optim": "adafactor"},
    "8-bit": {"optim": "adamw_bnb_8bit"}, "compile": {"torch_compile_backend": "inductor"},
    "activation-budget": {"torch_compile_backend": "inductor", "activation_memory_budget": 0.5},
    "workers": {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2},
    "by-length": {"train_sampling_strategy": "group_by_length"},
    "balanced": {"train_sampling_strategy": "batch_rebalance"}, "packing": {"packing": True},
    "lora": {"adapter": {"kind": "lora", "rank": 2}},
    "lora-pure-bf16": {"adapter": {"kind": "lora", "rank": 2}, "precision": "pure_bf16"},
    "lora-checkpointed": {"adapter": {"kind": "lora", "rank": 2}, "checkpointing": "full"},
    "bitfit": {"adapter": {"kind": "bitfit"}}, "prefix": {"adapter": {"kind": "prefix"}},
    "p-tuning": {"adapter": {"kind": "p-tuning"}},
    "qlora": {"adapter": {"kind": "lora", "rank": 2}, "quantization": "nf4"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOBS)
def test_trainer_and_loop_agree_with_every_knob(answer, run, name):
    settings = KNOBS[name]
    result = answer("gpt2" if name == "bitfit" else "llama", Task.CAUSAL_LM, **settings)
    by_trainer, by_loop = run(result, "python"), run(result, "accelerate-loop")
    assert by_trainer["samples_per_second"] > 0
    # New weights are drawn by each script as it comes to them, and samples by length in an order of its own.
    drawn = "adapter" in settings or "train_sampling_strategy" in settings
    assert by_loop["loss"] == pytest.approx(by_trainer["loss"], rel=0.05 if drawn else 2e-4)


def test_scripts_work_the_loss_out_in_chunks_as_trials_do(answer, run):
    plain = answer("llama", Task.CAUSAL_LM)
    config = plain.best.config.model_copy(update={"chunked_loss": True})
    chunked = plain.model_copy(update={"best": plain.best.model_copy(update={"config": config})})
    measured = run(plain, "python")["loss"]
    assert run(chunked, "python")["loss"] == pytest.approx(measured, rel=1e-5)
    assert run(chunked, "accelerate-loop")["loss"] == pytest.approx(measured, rel=2e-4)


@pytest.fixture
def recipe_answer(answer, tmp_path):
    """Return a function that makes the answer of a recipe on as many rows of a file as a step takes."""

    def made(name, *, with_file=False):
        kind = RECIPES[name]
        recipe = Recipe(name=name, prompt_length=6, completion_length=6, generations=2 if kind.generates else 1)
        plain = answer("llama", Task.CAUSAL_LM)
        folder = plain.workload.model.path
        if kind.task is not Task.CAUSAL_LM:
            set_seed(1)
            model = build_model(plain.workload.model, kind.task, dtype="float32", device="cpu", num_labels=1)
            model.save_pretrained(folder)
        special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
        words = [*special.values(), *(str(n) for n in range(LLAMA["vocab_size"] - len(special)))]
        save_tokenizer(folder, words, "[UNK]", **special)
        changes = {"task": kind.task, "global_batch_size": 4, "recipe": recipe}
        if with_file:
            rows = [{c: f"{'a b ' * (1 if kind.generates else row + 1)}{c}" for c in kind.columns} for row in range(4)]
            rows = [{**r, "label": row % 2 == 0} if "label" in kind.columns else r for row, r in enumerate(rows)]
            changes["dataset"] = jsonl(tmp_path / "rows.jsonl", rows)
            if name not in ("sft", "reward"):
                changes["fixed_arguments"] = OWN | {"beta": 0.3}  # by which grpo has a reference, too
        workload = plain.workload.model_copy(update=changes)
        return answer_of(make_config(2, optim="adamw_torch"), workload=workload, hardware=plain.hardware)

    return made


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("default")
def test_trls_trainers_train_from_a_script(name, recipe_answer, run):
    pytest.importorskip("trl")
    found = run(recipe_answer(name), "trl")
    assert found["samples_per_second"] > 0
    assert math.isfinite(found["loss"])


def test_all_files_of_a_recipe_are_launched_by_its_script(recipe_answer, tmp_path):
    found = recipe_answer("sft")
    exported = found.model_copy(update={"baseline": found.best}).export("all", tmp_path / "files")
    assert {path.name for path in exported.paths} == {"training_args.json", "train_trl.py", "launch.txt"}
    assert (tmp_path / "files" / "launch.txt").read_text().splitlines()[1:] == ["python train_trl.py"]
    assert exported.launch == ("python train_trl.py",)


def test_trl_is_asked_to_cut_no_samples_where_it_pads_none(answer):
    given = constant(draft(answer("llama", Task.CAUSAL_LM, packing=True), "trl").text, "SFT_ARGUMENTS")
    assert (given["padding_free"], given["max_length"]) == (True, None)  # with a length TRL 1.16 refuses it


def test_trl_loads_its_reference_and_its_tokenizer_as_the_model_is_loaded(recipe_answer):
    result = recipe_answer("dpo")
    model = result.workload.model.model_copy(update={"source": "hub", "revision": "v1"})
    made = result.model_copy(update={"workload": result.workload.model_copy(update={"model": model})})
    text = draft(made, "trl").text
    assert 'AutoTokenizer.from_pretrained(options.model, revision="v1")' in text
    assert constant(text, "MODEL_ARGUMENTS")["revision"] == "v1"
    assert 'own["model_init_kwargs"] = MODEL_ARGUMENTS' in text


def test_a_reward_that_was_measured_is_not_left_out_in_silence(recipe_answer):
    result = recipe_answer("grpo")
    own = result.workload.recipe.model_copy(update={"reward": "rewards:exact"})
    own = result.model_copy(update={"workload": result.workload.model_copy(update={"recipe": own})})
    plain, made = (draft(each, "trl") for each in (result, own))
    assert (plain.lost, made.lost) == ((), ("--reward rewards:exact: import it in place of the function `reward`",))
    assert "PUT YOUR OWN HERE (rewards:exact was measured)" in made.text


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("default")
def test_a_script_of_trl_has_the_losses_of_the_trial(name, recipe_answer, run, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    result = recipe_answer(name, with_file=True)
    workload, kind = result.workload, RECIPES[name]
    trainer_class, losses = getattr(trl, kind.trainer), []
    original = trainer_class.training_step

    def training_step(*args, **kwargs):
        loss = original(*args, **kwargs)
        losses.append(float(loss))
        return loss

    monkeypatch.setattr(trainer_class, "training_step", training_step)
    # The rows in one order, and of all prompts the same completions, of lengths that differ.
    monkeypatch.setattr(recipes, "row_order", lambda lengths, *_, **__: range(len(lengths)))
    if kind.generates:
        made = [[5 + i, 6, 7 + i][: 1 + i % 3] for i in range(4)]
        generated = (made, None) if name == "grpo" else made
        monkeypatch.setattr(trainer_class, "_generate_single_turn", lambda *_, **__: generated)
    recipes.checked_data(workload, tmp_path / "data")
    mapping = training_plan(result.best.config, workload, result.hardware)
    arguments = {**mapping.tuned, **mapping.harness, "output_dir": str(tmp_path / "trial"), "max_steps": STEPS}
    samples = 4 * workload.recipe.generations
    how = {"directory": tmp_path / "data", "samples": samples, "distinct": samples, "longest_first": 0}
    trainer, _ = recipes.recipe_trainer(workload, mapping, arguments, pretrained(result), **how)
    assert isinstance(trainer, trainer_class)
    trainer.train()
    of_trial = losses.copy()
    losses.clear()
    run(result, "trl")
    per_step = result.workload.accumulation_steps(result.best.config)
    steps = [np.array(found).reshape(-1, per_step).sum(axis=1) for found in (of_trial, losses)]
    assert len(steps[0]) == STEPS
    assert steps[1] == pytest.approx(steps[0], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("suffix", "text"), [(".tsv", "text\tn\na b\t1\n"), (".csv", "text,n\na b,1\n"), (".txt", "a b")]
)
def test_a_recipes_script_reads_every_kind_of_file(recipe_answer, tmp_path, suffix, text):
    (tmp_path / f"rows[1]{suffix}").write_text(text)
    result = recipe_answer("sft")
    workload = result.workload.model_copy(update={"dataset": str(tmp_path / f"rows[1]{suffix}")})
    script = {"__name__": "script"}
    exec(draft(result.model_copy(update={"workload": workload}), "trl").text, script)
    assert script["training_data"](None)["text"] == ["a b"]


def test_other_targets_do_not_train_a_recipe(recipe_answer):
    with pytest.raises(InputError, match="python: DPOTrainer trained it; --to trl writes a script with it"):
        draft(recipe_answer("dpo"), "python")


@pytest.mark.slow
@pytest.mark.parametrize(("target", "sharding"), [("accelerate-loop", "none"), ("python", "zero_3")])
def test_two_processes_do_the_step_of_one(answer, run, tmp_path, target, sharding):
    if sharding != "none":
        pytest.importorskip("deepspeed")
    alone = answer("t5", Task.SEQ2SEQ_LM, own={**OWN, "logging_steps": 1})  # when the Trainer asks all for their loss
    expected = run(alone, "accelerate-loop")["loss"]
    spread = Parallelism(world_size=2, sharding=sharding)
    config = alone.best.config.model_copy(update={"parallelism": spread})
    together = answer_of(config, workload=alone.workload, hardware=alone.hardware)
    exported = together.export(target, tmp_path / "two")
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [torchrun, "--standalone", "--nproc_per_node", "2", exported.paths[0], "--steps", str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (printed,) = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    assert json.loads(printed)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("target", ["python", "apply", "result"])
def test_an_answer_for_one_gpu_trains_on_one_where_several_are_visible(answer, tmp_path, target):
    """The Trainer would copy the model to each, for larger steps, and those of TRL would refuse to begin."""
    found, gpu = answer("llama", Task.CAUSAL_LM, own={"report_to": "none"}), make_gpu(versions=installed_versions())
    found = answer_of(found.best.config, workload=found.workload, hardware=gpu)
    found.save(tmp_path / "best.json")
    apply = ["-m", "autotune", "script", "--apply", "best.json", "--", "python"] if target == "apply" else []
    words, text = [*apply, tmp_path / "own.py", "--max_steps", "2"], LLAMA_SCRIPT
    if target == "python":
        words, text = [tmp_path / "own.py", "--steps", "2"], draft(found, "python").text
    elif target == "result":
        made = "import autotune\nargs = autotune.load('best.json').training_arguments('out', max_steps=2)\n"
        text = text.replace("set_seed(args.seed)\n", made)
    text = text.replace("import torch\n", "import torch\n\ntorch.nn.DataParallel.__init__ = None\n")
    (tmp_path / "own.py").write_text(text)
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", SCRIPTS)
@pytest.mark.parametrize(
    "answer",
    [
        *(ANSWERS[name] for name in ("plain", "qlora", "run", "fp8")), {"adapter": {"kind": "bitfit"}},
        {"adapter": {}, "precision": "pure_bf16"}, {"chunked_loss": True}, {"adapter": {"kind": "p-tuning"}},
        {"parallelism": {"world_size": 2}, "torch_compile_backend": "inductor", "torch_compile_mode": "max-autotune"},
        {"name": 'weird"name\\', "optim": "adamw_bnb_8bit"},
        {"hardware": CPU, "train_sampling_strategy": "group_by_length", "dataloader_num_workers": 2},
        {"parallelism": {"world_size": 2}, "train_sampling_strategy": "batch_rebalance"},
    ],
    ids=["plain", "qlora", "run", "fp8", "bitfit", "lora", "chunks", "p-tuning", "ddp", "names", "cpu", "balanced"],
)  # fmt: skip
def test_scripts_are_python_that_needs_no_autotune(target, answer):
    source = drafted(target, **answer).text
    tree = ast.parse(source)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.startswith("autotune")]
    assert max(map(len, source.splitlines())) <= 120
    assert ("convert_model_to_fp8_ao(model, Float8" in source) == (answer.get("precision") == "fp8")


def test_a_script_of_trl_has_adapters_on_packed_weights_in_fp32_and_ligers_kernel_of_the_loss_as_trials_do():
    assert ".data.float()" in drafted("trl", **ANSWERS["qlora"]).text
    assert ".data.float()" not in drafted("trl", **ANSWERS["lora"]).text
    assert "arguments.liger_kernel_config = None" in drafted("trl", **ANSWERS["fp16"]).text  # TRL leaves it out


def test_a_loop_tells_ddp_what_the_trainer_does():
    spread = {"world_size": 2, "ddp_bucket_cap_mb": 100, "ddp_broadcast_buffers": False}
    made = drafted("accelerate-loop", parallelism=spread, own={"ddp_static_graph": True})
    told = "find_unused_parameters=True, bucket_cap_mb=100, broadcast_buffers=False, static_graph=True"
    assert f"DistributedDataParallelKwargs({told})" in made.text
    assert made.text.index("free_memory(model") < made.text.index("end_training")  # or gloo's threads may wait for ever
    assert made.lost == ()


def test_a_single_gpu_is_the_only_one_that_a_script_sees():
    assert drafted("python").launch == ("CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} python train.py",)
    assert drafted("python", hardware=CPU).launch == ("python train.py",)
    several = drafted("accelerate-loop", parallelism={"world_size": 2}).launch
    on = ({}, {"hardware": CPU}, {"parallelism": {"world_size": 2}})
    assert ["arguments._n_gpu = 1" in drafted("python", **one).text for one in on] == [True, False, False]
    assert several == ("OMP_NUM_THREADS=4 torchrun --standalone --nproc_per_node 2 accelerate_loop.py",)


@pytest.mark.filterwarnings("default")  # the imports of TRL
@pytest.mark.parametrize("name", list(ANSWERS))
def test_sft_config_takes_its_arguments(name, tmp_path):
    trl = pytest.importorskip("trl")
    ours = {**ANSWERS[name], "hardware": HERE}
    ours = {key: value for key, value in ours.items() if key not in ("parallelism", "tf32")}
    if ours.get("precision") == "fp16":
        pytest.skip("TrainingArguments takes fp16 on a GPU alone")
    arguments = trl.SFTConfig(str(tmp_path), **constant(draft(answer_with(**ours), "trl").text, "SFT_ARGUMENTS"))
    assert arguments.bf16 == (ours.get("precision") in ("bf16", "fp8"))
    assert bool(arguments.gradient_checkpointing) == ("checkpointing" in ours)  # under its older name, which stays
