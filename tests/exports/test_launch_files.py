"""How an answer is launched: commands, the files that launchers and libraries read, and a user's own script."""

import json
from typing import Any

import answers
import pytest
import yaml
from conftest import TINY_LLAMA
from exporting import GPU, answer_of, drafted
from factories import make_config, make_hardware, make_spec, make_workload
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments

from autotune.errors import InputError
from autotune.exports import launch_files, targets
from autotune.exports.launch_files import ACCELERATE, ARGUMENTS, DEEPSPEED, FSDP, flags, in_code, user_launch
from autotune.training.arguments import UNIT_PARAMETERS, training_plan
from autotune.tuning_result import TuningResult, with_methods
from autotune.values.budget import Soaked
from autotune.values.config import Parallelism
from autotune.values.hardware import installed_versions
from autotune.values.model import Task
from autotune.values.workload import OwnCode, OwnStep


def measured(world_size: int = 2, *, hardware=None, knobs: dict[str, Any] | None = None, **spread: Any) -> TuningResult:
    config = make_config(2, parallelism=Parallelism(world_size=world_size, **spread), **(knobs or {}))
    fixed = {"max_grad_norm": 0.5} if knobs else {}
    workload = make_workload(model=make_spec(config={"hidden_size": 100}), fixed_arguments=fixed)
    return answer_of(config, workload=workload, hardware=hardware or GPU)


def document(name: str, *args: Any, **spread: Any) -> dict[str, Any]:
    return json.loads(launch_files.text_of(name, measured(*args, **spread)))


EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True "


@pytest.mark.parametrize("target", ["python", "accelerate", "accelerate-loop", "trl"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_command_line_sets_the_variables_of_the_answer(target, world_size):
    answer = {"name": "meta-llama/Llama-3.2-1B", "parallelism": {"world_size": world_size}}
    plain, expandable = (drafted(target, **answer, expandable_segments=on).launch[0] for on in (False, True))
    assert "PYTORCH_ALLOC_CONF" not in plain
    assert expandable.replace(EXPANDABLE, "") == plain
    assert expandable.partition("train")[0].count(EXPANDABLE) == 1


SHARED = {"parallelism": {"world_size": 4, "sequence_parallel": 2, "sharding": "zero_3"}}


@pytest.mark.parametrize(
    ("target", "sharding", "parts"),
    [
        ("training-args", "zero_3", ("SP_SIZE=2", "DP_REPLICATE_SIZE=2", "SP_ATTN_IMPLEMENTATION=sdpa")),
        ("accelerate", "zero_3", ("SP_SIZE=2", "DP_REPLICATE_SIZE=2", "SP_ATTN_IMPLEMENTATION=sdpa")),
        ("accelerate", "fsdp_full", ("CP_SIZE=2", "DP_SHARD_SIZE=2")),
        ("python", "fsdp_grad_op", ("CP_SIZE=2", "DP_SHARD_SIZE=2")),  # where the Trainer makes the positions itself
    ],
)
def test_a_command_line_says_that_ranks_share_tokens(target, sharding, parts):
    shared = {"parallelism": {**SHARED["parallelism"], "sharding": sharding}}
    variables = drafted(target, **shared).launch[0].partition(" OMP_NUM_THREADS=")[0]
    told = ["ACCELERATE_USE_PARALLELISM_CONFIG=true", *(f"PARALLELISM_CONFIG_{part}" for part in parts)]
    assert variables == " ".join(told)


def test_of_ranks_that_share_tokens_the_trainer_counts_the_batch_and_no_script_is_written():
    assert json.loads(drafted("deepspeed", **SHARED).text)["train_batch_size"] == "auto"
    with pytest.raises(InputError, match="python: sequence parallel takes position_ids in each batch"):
        drafted("python", **SHARED)


def test_ranks_are_started_by_torchrun_with_the_threads_that_trials_gave_them():
    first, second = launch_files.launch_commands(measured(4))
    assert first == "OMP_NUM_THREADS=2 torchrun --standalone --nproc_per_node 4 train.py"
    assert second == "OMP_NUM_THREADS=2 accelerate launch --config_file accelerate.yaml train.py"
    one = launch_files.launch_commands(measured(1, sharding="zero_2", offload="optimizer"))[0]
    assert one.endswith("torchrun --standalone --nproc_per_node 1 train.py")
    several = measured(4, hardware=GPU.model_copy(update={"count": 4, "nodes": 2}))
    assert launch_files.launch_commands(several) == (
        "OMP_NUM_THREADS=4 torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint FIRST_MACHINE:29500 "
        "--nproc_per_node 2 train.py",
        "OMP_NUM_THREADS=4 accelerate launch --config_file accelerate.yaml --machine_rank NUMBER "
        "--main_process_ip FIRST_MACHINE --main_process_port 29500 train.py",
    )
    assert launch_files.on_each_machine(several) == " on each of 2 machines"
    assert launch_files.on_each_machine(measured(4)) == ""
    assert yaml.safe_load(launch_files.text_of(ACCELERATE, several))["num_machines"] == 2
    # On a CPU accelerate would start one process.
    assert len(launch_files.launch_commands(measured(2, hardware=make_hardware()))) == 1


@pytest.mark.parametrize(
    ("spread", "there"),
    [
        ({"world_size": 1}, {ARGUMENTS, ACCELERATE}),
        ({}, {ARGUMENTS, ACCELERATE}),
        ({"sharding": "fsdp_full"}, {ARGUMENTS, ACCELERATE, FSDP}),
        ({"sharding": "zero_3"}, {ARGUMENTS, ACCELERATE, DEEPSPEED}),
        ({"hardware": make_hardware()}, {ARGUMENTS}),
    ],
)
def test_there_are_files_for_what_is_used(tmp_path, spread, there):
    names = {path.name for path in measured(**spread).export("all", tmp_path).paths}
    files = {launch_files.FILE_NAMES[name] for name in there} | {"launch.txt"}
    assert {name for name in names if not name.endswith(".py")} == files


def test_deepspeeds_file_has_the_figures_that_the_trainer_would_fill_in():
    found = document(DEEPSPEED, 4, sharding="zero_3", knobs={"precision": "bf16"})
    assert "auto" not in json.dumps(found)
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (16, 2)
    assert (found["gradient_accumulation_steps"], found["gradient_clipping"]) == (2, 0.5)
    assert found["bf16"] == {"enabled": True}
    assert found["zero_optimization"]["stage3_prefetch_bucket_size"] == 9000
    assert found["zero_optimization"]["stage3_param_persistence_threshold"] == 1000


BY_SIZE = {"fsdp_reshard_after_forward": False, "fsdp_min_num_params": UNIT_PARAMETERS}


@pytest.mark.parametrize(
    ("spread", "kind", "settings"),
    [
        ({}, "MULTI_GPU", {}),
        ({"sharding": "fsdp_grad_op", "wrapping": "size"}, "FSDP", BY_SIZE),
        ({"sharding": "zero_3"}, "DEEPSPEED", {"deepspeed_config_file": "deepspeed.json", "zero3_init_flag": True}),
    ],
)
def test_accelerate_reads_its_file_which_leaves_to_deepspeed_what_is_deepspeeds(spread, kind, settings, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    measured(knobs={"precision": "bf16"}, **spread).export("all", tmp_path)
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (config.num_processes, config.distributed_type) == (2, kind)
    found = yaml.safe_load((tmp_path / "accelerate.yaml").read_text())
    assert found.get("mixed_precision") == (None if kind == "DEEPSPEED" else "bf16")
    assert settings.items() <= {**found.get("fsdp_config", {}), **found.get("deepspeed_config", {})}.items()


def test_training_arguments_read_their_file_and_fsdps(tmp_path):
    on_cpu = make_hardware(versions=installed_versions())  # whose arguments can be made here
    measured(2, sharding="fsdp_grad_op", hardware=on_cpu).export("all", tmp_path)
    parser = HfArgumentParser((TrainingArguments,))
    (args,) = parser.parse_json_file(str(tmp_path / "training_args.json"))
    assert args.fsdp is True
    assert args.fsdp_plugin_args["reshard_after_forward"] is False
    fsdp = str(tmp_path / "fsdp.json")
    by_file = TrainingArguments(str(tmp_path), fsdp=True, fsdp_config=fsdp, use_cpu=True, report_to="none")
    assert by_file.fsdp_plugin_args == args.fsdp_plugin_args


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # DeepSpeed's imports
@pytest.mark.parametrize(
    ("stage", "offload", "to"), [(1, "none", None), (2, "optimizer", "cpu"), (3, "parameters", "cpu")]
)
def test_deepspeed_reads_its_file(stage, offload, to, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import config as deepspeed_config

    monkeypatch.setattr(deepspeed_config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed_config.dist, "get_world_size", lambda: 2)
    measured(2, knobs={"precision": "bf16"}, sharding=f"zero_{stage}", offload=offload).export("all", tmp_path)
    config = deepspeed_config.DeepSpeedConfig(str(tmp_path / "deepspeed.json"))
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (16, 2)
    assert (config.gradient_clipping, config.zero_optimization_stage) == (0.5, stage)
    assert getattr(config.zero_config.offload_optimizer, "device", None) == to
    assert (config.zero_config.offload_param is not None) == (offload == "parameters")


def user_answer(config, code=None, others=(), hardware=None, **workload):
    """Return the answer of a search that found `config` to be faster than the Trainer's defaults and `others`."""
    base, hardware = answers.BASE, hardware or make_hardware()
    code = code or OwnCode(kind="script", shown="python train.py", command=("train.py", "--lr", "1"), directory="/")
    made = make_workload(**workload)
    own = training_plan(base, made, hardware).overrides(made)  # the script's are those of the baseline
    made = made.model_copy(update={"own_code": code.model_copy(update={"arguments": own})})
    found = with_methods(answers.answer([(base, 10.0), (config, 20.0), *others], workload=made, hardware=hardware))
    assert found.best.config == config
    return found


def test_flags_say_what_differs_from_the_scripts_own_arguments_and_nothing_else():
    def told(answer):
        words, _ = flags(answer)
        return {f"{name} {value}" for name, value in zip(words[::2], words[1::2], strict=True)}

    answer = user_answer(make_config(16, precision="bf16", optim="adafactor"))
    batch = {"--per_device_train_batch_size 16", "--gradient_accumulation_steps 1"}
    assert told(answer) == {*batch, "--optim adafactor", "--bf16 True"}
    for found, needed in ((answer, {"--use_cpu True"}), (user_answer(make_config(16, optim="adafactor")), set())):
        code = found.workload.own_code  # transformers refuses bf16 without a GPU unless it is told to use none
        code = code.model_copy(update={"arguments": {**code.arguments, "use_cpu": False}})
        silent = found.model_copy(update={"workload": found.workload.model_copy(update={"own_code": code})})
        assert told(silent) == told(found) | needed
    soaked = answer.model_copy(update={"soaked": Soaked(eval_batch_size=64, checkpoint_bytes=1)})
    assert told(soaked) == {*told(answer), "--per_device_eval_batch_size 64"}


def test_flags_of_fsdp_are_such_as_transformers_reads(tmp_path):
    two = make_hardware(count=2)
    answer = user_answer(make_config(4, parallelism=Parallelism(world_size=2, sharding="fsdp_full")), hardware=two)
    words, _ = flags(answer)
    parser = HfArgumentParser(TrainingArguments)
    (read,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--use_cpu", "True", *words])
    assert read.fsdp is True
    assert read.fsdp_config.items() >= answer.arguments.training_arguments["fsdp_config"].items()


def test_options_of_checkpointing_are_json_under_the_newer_name_alone():
    switched = ("--activation_checkpointing", "True")
    options = ("--activation_checkpointing_kwargs", '{"use_reentrant": false, "every_n_layers": 2}')
    assert flags(user_answer(make_config(checkpointing="every-2nd")))[0] == (*switched, *options)
    assert flags(user_answer(make_config(checkpointing="full")))[0] == switched


def test_what_flags_can_not_say_is_said():
    best = make_config(attn_implementation="eager", precision="pure_bf16", adapter={"rank": 4})
    said = {"model.set_attn_implementation('eager')", f"peft's {best.adapter.shown}", "weights in bfloat16"}
    assert set(flags(user_answer(best))[1]) == said
    found = answer_of(make_config(precision="fp8", torch_compile_backend="inductor"))
    assert "result.prepare_model(model), whose linear layers multiply in fp8" in in_code(found)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_checkpointing_that_the_code_switches_on_itself_no_flag_switches_off(checkpoints):
    words = {"shown": "python train.py", "command": ("train.py",), "directory": "/"}
    code = OwnCode(kind="script", checkpoints=checkpoints, **words)
    found = user_answer(make_config(16), code)
    assert ("model.gradient_checkpointing_disable()" in flags(found)[1]) is checkpoints
    kept = user_answer(make_config(16, checkpointing="full"), code)
    assert "model.gradient_checkpointing_disable()" not in flags(kept)[1]
    for answer, is_left in ((found, not checkpoints), (kept, True)):
        model = LlamaForCausalLM(LlamaConfig.from_dict(TINY_LLAMA))
        model._set_gradient_checkpointing()
        assert answer.prepare_model(model).model.layers[0].gradient_checkpointing is is_left


def test_a_script_is_run_again_by_a_command_that_can_be_copied():
    found = user_answer(make_config(16))
    first, second = user_launch(found, "runs/my run/best-config.json")
    assert first == "train with it: autotune script --apply 'runs/my run/best-config.json' -- python train.py --lr 1"
    assert "--per_device_train_batch_size 16 --gradient_accumulation_steps 1" in second
    assert found.launch_commands == ("autotune script --apply best-config.json -- python train.py --lr 1",)


@pytest.mark.parametrize(
    ("micro_batch", "others", "said"),
    [
        (16, [(make_config(16), 14.0)], "the flags alone have 1.40 of its 2.00 times the baseline's speed"),
        (16, [], "how fast the flags alone are was not measured"),
        (make_config().per_device_train_batch_size, [], "without it nothing of the gain is left"),
    ],
)
def test_the_answer_says_how_much_of_its_speed_the_flags_have(micro_batch, others, said):
    answer = user_answer(make_config(micro_batch, attn_implementation="eager"), others=others)
    assert said in user_launch(answer, "best-config.json")[1]
    assert targets.draft(answer, ARGUMENTS).lost == ("model.set_attn_implementation('eager')", said)


def test_a_trainer_is_trained_from_python(tmp_path):
    answer = user_answer(make_config(16), OwnCode(kind="pickle", shown="trainer Trainer", directory="/"))
    (line,) = user_launch(answer, "best-config.json")
    assert "result.training_arguments(output_dir)" in line
    assert launch_files.launch_commands(answer) == ()
    assert "launch.txt" not in {path.name for path in answer.export("all", tmp_path).paths}
    (line,) = targets.to_train(answer, "runs/a.json")
    assert line == "# in your own code: autotune.load('runs/a.json').training_arguments(output_dir)"


def test_a_loop_of_a_named_model_has_no_script_and_its_knobs_are_not_left_out_in_silence():
    step = OwnStep(name="step", takes_accumulation=False, knobs={}, directory="/", search_path=())
    answer = answer_of(make_config(8, own={"width": 256}), workload=make_workload(own_step=step))
    assert launch_files.launch_commands(answer) == ()
    assert targets.draft(answer, ARGUMENTS).lost == ("width=256, of your loop",)
    with pytest.raises(InputError, match="your own code makes the model"):
        targets.draft(answer, "python")


@pytest.mark.parametrize(
    ("task", "micro_batch", "is_told"),
    [(Task.SEQ2SEQ_LM, 4, True), (Task.SEQ2SEQ_LM, 16, False), (Task.CAUSAL_LM, 4, False)],
)
def test_arguments_alone_say_that_a_loss_is_not_theirs(task, micro_batch, is_told):
    """Where gradients accumulate, and the head doesn't count the labels of a step."""
    answer = answer_of(make_config(micro_batch), workload=make_workload(task=task))
    assert any("normalize_loss" in lost for lost in targets.draft(answer, ARGUMENTS).lost) == is_told


def test_arguments_alone_name_what_the_baseline_has_that_they_can_not_say():
    fixed = {"adapter": {}, "quantization": "nf4", "precision": "bf16", "attn_implementation": "sdpa"}
    result = answer_of(make_config(8, **fixed), baseline=make_config(4, **fixed))
    told = ("peft's lora rank 16 on all-linear", "base weights in nf4", "weights in float32 (dtype of from_pretrained)")
    assert targets.draft(result, ARGUMENTS).lost == told


def test_a_file_that_names_another_says_how_that_is_written():
    answer = measured(sharding="zero_2")
    assert targets.draft(answer, ACCELERATE).lost == ("deepspeed.json, which it names: --to deepspeed writes it",)
    assert targets.drafts(answer)[0][ACCELERATE].lost == ()


def test_lines_that_train_write_the_script_that_they_run(tmp_path):
    exported = "autotune export 'runs/a b' --to python --output train.py"
    for gpu in (0, 3):  # the one that was measured
        run = f"CUDA_VISIBLE_DEVICES=${{CUDA_VISIBLE_DEVICES:-{gpu}}} python train.py"
        on = GPU.model_copy(update={"device": f"cuda:{gpu}"})
        assert targets.to_train(measured(1, hardware=on), "runs/a b") == (exported, run)
    on = GPU.model_copy(update={"device": "cuda:3", "peers": ("cuda:0", "cuda:2")})
    for devices, chosen in ((1, "3"), (2, "3,0")):
        (_, run) = targets.to_train(measured(devices, hardware=on), "runs/a b")
        first = f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=${{CUDA_VISIBLE_DEVICES:-{chosen}}} "
        assert run.startswith((f"{first}python ", f"{first}OMP_NUM_THREADS=4 torchrun "))
    first, both = "${CUDA_VISIBLE_DEVICES:-4}", "${CUDA_VISIBLE_DEVICES:-4,6}"
    for gpu, devices, chosen in ((0, 1, first), (0, 2, both), (1, 1, "6")):  # of those that the search saw
        on = GPU.model_copy(update={"device": f"cuda:{gpu}", "visible": ("4", "6", "7")})
        assert targets.to_train(measured(devices, hardware=on), "a")[-1].startswith(f"CUDA_VISIBLE_DEVICES={chosen} ")
    ulysses = answer_of(make_config(4, **SHARED))
    assert len(targets.to_train(ulysses, "a.json")) == 1
    assert targets.missing_script(ulysses, "a.json", ulysses.export("training-args", tmp_path)).endswith("arguments")
    (line,) = targets.to_train(user_answer(make_config(16)), "runs/a b")
    assert line == "autotune script --apply 'runs/a b' -- python train.py --lr 1"


def test_a_model_data_and_loss_of_the_users_code_are_not_made_up():
    from torch import nn

    answer, model = user_answer(make_config(16)), nn.Linear(2, 2)
    for made in (answer.build_model, lambda: answer.training_data(1)):
        with pytest.raises(InputError, match=r"python train.py makes its own model and data"):
            made()
    with pytest.raises(InputError, match=r"it trains by: autotune script --apply a.json -- python train.py --lr 1$"):
        targets.draft(answer, "trl", "a.json")
    assert answer.prepare_model(model) is model
    assert type(model) is nn.Linear
