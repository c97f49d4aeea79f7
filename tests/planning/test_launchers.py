"""Command lines of scripts: which are taken, and what a launcher adds to the script's own arguments."""

import os
import sys

import pytest
from factories import make_gpu

from autotune.errors import InputError, MachineError
from autotune.execution.places import numbers_of
from autotune.planning.launchers import code_of, without_launcher
from autotune.planning.options import SearchOptions
from autotune.planning.user_code import UserTrainer

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("python train.py --bf16", "python train.py --bf16"),
        ("python3.11 -u train.py", "python train.py"),
        ("train.py -m x", "python train.py -m x"),
        ("python -m pack.train --a 1", "python -m pack.train --a 1"),
        (f"{sys.executable} train.py", "python train.py"),
    ],
)
def test_a_command_line_names_a_script_and_its_arguments(words, line, here):
    code = code_of(words.split())
    assert (code.command_line, code.is_module, code.directory) == (line, "-m pack" in words, str(here))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no script: write its command line after --"),
        ("accelerate test", "accelerate: write `python` and the script in its place; --devices N starts N"),
        ("bash train.sh", "bash: write `python` and the script in its place"),
        ("python", "python: expected a script"),
        ("python -c print(1)", "expected a script"),
        ("python missing.py", "missing.py: no such script"),
        ("/somewhere/else/bin/python train.py", "another Python than autotune's"),
    ],
)
def test_what_starts_no_script_of_this_python_is_refused(words, message):
    with pytest.raises(InputError, match=message):
        code_of(words.split())


@pytest.mark.parametrize(
    ("words", "line", "processes"),
    [
        ("torchrun --standalone --nproc-per-node 2 train.py --a 1", "python train.py --a 1", 2),
        ("python -m torch.distributed.run --nproc_per_node=gpu -m pack.train", "python -m pack.train", "all"),
        ("python -u -m accelerate.commands.launch --num_processes 4 train.py -m x", "python train.py -m x", 4),
        ("python3 -B -u -m torch.distributed.launch --nproc_per_node 2 train.py", "python train.py", 2),
        ("accelerate launch --num_processes 8 train.py --num_processes 3", "python train.py --num_processes 3", 8),
        ("accelerate launch --cpu -m pack.train", "python -m pack.train", 1),
        ("/usr/bin/torchrun --nproc_per_node 2 train.py", "python train.py", 2),
        ("torchrun --nproc_per_node cpu train.py", "python train.py", os.cpu_count()),
        ("torchrun --nnodes 1:1 --nproc_per_node 2 train.py", "python train.py", 2),
        ("python train.py torchrun", "python train.py torchrun", None),
    ],
)
def test_a_launcher_tells_how_many_processes_train(words, line, processes, here):
    found = without_launcher(words.split())
    assert (" ".join(found.words), found.processes, dict(found.arguments)) == (line, processes, {})
    subject = UserTrainer(SearchOptions(model=""), script=words.split())
    assert numbers_of(make_gpu(count=8), subject.options.devices) == ({None: 1, "all": 8}.get(processes, processes),)
    assert subject.code.command_line == line


@pytest.mark.parametrize("words", ["torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d train.py",
                                   "accelerate launch --num_machines 2 --num_processes 8 train.py"])  # fmt: skip
def test_machines_of_a_launcher_are_nodes_of_a_cluster(words, here):
    fleet = UserTrainer(SearchOptions(model=""), script=words.split()).options.fleet
    assert (fleet.engine, fleet.devices, fleet.nodes) == ("ray", 8, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("torchrun --nproc_per_node 2", "torchrun: the following arguments are required: training_script"),
        ("torchrun --nproc_per_node two train.py", "torchrun: .*'two'"),
        ("torchrun --nnodes 1:4 train.py", "torchrun: 1:4 machines: name one number of them"),
        ("torchrun --nnodes 2 --nproc_per_node gpu train.py", "say how many processes each of the 2 machines has"),
        ("accelerate launch --dynamo_use_dynamic train.py", "dynamo_use_dynamic True: autotune starts"),
        ("accelerate launch --cpu --mixed_precision fp8 train.py", "mixed_precision fp8: .*your TrainingArg"),
        ("accelerate launch --use_fsdp --num_processes 2 train.py", "fsdp_version 1: trials train by FSDP2"),
        ("accelerate launch --config_file missing.yaml train.py", "missing.yaml` does not exist"),
        ("torchrun --nproc_per_node 2 train.py", "--devices: your launcher starts 2 processes; leave one of them out"),
    ],
)  # fmt: skip
def test_a_launcher_that_does_more_than_start_processes_here_is_refused(words, message, here):
    with pytest.raises(InputError, match=message):
        UserTrainer(SearchOptions(model="", devices=4), script=words.split())


FSDP = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 4
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,Mlp
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
ZERO = "distributed_type: DEEPSPEED\nmixed_precision: fp16\nnum_processes: 4\ndeepspeed_config:\n  "
OF_FSDP = {
    "version": 2, "reshard_after_forward": False, "cpu_offload": "false", "activation_checkpointing": "false",
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "Mlp"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        (FSDP, {"bf16": True, "fsdp": True, "fsdp_config": OF_FSDP}),
        (ZERO + "deepspeed_config_file: zero.json", {"fp16": True, "deepspeed": "zero.json"}),
        (ZERO + "zero_stage: 3\n  offload_optimizer_device: cpu",
         {"fp16": True, "deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}}),
        (ZERO + "zero3_init_flag: false", {"fp16": True, "deepspeed": {"zero_optimization": {"stage": 2}}}),
        ("distributed_type: MULTI_GPU\nmixed_precision: 'no'\nnum_processes: 4", {}),
        ("distributed_type: MULTI_GPU\nmixed_precision: 'no'\nnum_processes: 4\ndynamo_config:\n"
         "  dynamo_backend: INDUCTOR\n  dynamo_mode: max-autotune",
         {"torch_compile": True, "torch_compile_backend": "inductor", "torch_compile_mode": "max-autotune"}),
    ],
    ids=["FSDP", "DeepSpeed's file", "DeepSpeed", "ZeRO-2", "DDP", "dynamo"],
)  # fmt: skip
def test_settings_of_accelerate_stand_for_arguments_of_the_trainer(settings, arguments, here):
    settings += "\ncompute_environment: LOCAL_MACHINE\nmachine_rank: 0\nnum_machines: 1\n"
    (here / "a.yaml").write_text(settings)
    words = ["accelerate", "launch", "--config_file", "a.yaml", "train.py"]
    assert (code_of(words).launched, code_of(words[-1:]).launched) == (arguments, None)
    assert without_launcher(words).processes == 4
    told = {"bf16": ("bf16", "true"), "fp16": ("fp16", None)}.get(next(iter(arguments), ""), ("no", None))
    variables = code_of(words).variables  # for an `Accelerator` of a loop
    assert (variables["ACCELERATE_MIXED_PRECISION"], variables.get("ACCELERATE_USE_FSDP")) == told


def test_settings_that_accelerate_itself_refuses_are_told_in_its_words(here):
    contrary = "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_sync_module_states: false\n"
    (here / "a.yaml").write_text(f"{FSDP}{contrary}compute_environment: LOCAL_MACHINE\nnum_machines: 1\n")
    with pytest.raises(InputError, match=r"accelerate: When using .*set `--fsdp_sync_module_states`"):
        code_of(["accelerate", "launch", "--config_file", "a.yaml", "train.py"])


@pytest.mark.parametrize("words", ["torchrun --nproc_per_node 2 train.py", "accelerate launch train.py"])
def test_where_torch_can_not_be_imported_the_script_is_to_be_named_alone(words, monkeypatch):
    for name in ("torch.distributed.run", "accelerate.commands.launch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MachineError, match=r"its options can't be read here .*: --devices N -- python"):
        without_launcher(words.split())
