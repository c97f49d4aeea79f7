"""The reference of a search: the user's own arguments, or the Trainer's defaults."""

import functools
import json

import pytest
from factories import make_config, make_facts, make_gpu, make_hardware, make_workload
from transformers import TrainingArguments

from autotune.errors import InputError
from autotune.training.arguments import arguments_class, training_plan
from autotune.training.baseline import NOTHING_GIVEN, UserArguments, baseline_config, check_arguments, read_arguments
from autotune.values.config import Parallelism, TrainConfig
from autotune.values.workload import RECIPES, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL 1.16 asks for it

OF_TRL = {"checkpointing": "full", "precision": "bf16"}
ZERO = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}


@pytest.fixture
def read(tmp_path):
    def read_document(document: object) -> UserArguments:
        path = tmp_path / "args.json"
        text = document if isinstance(document, str | bytes) else json.dumps(document)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_arguments(path)

    return read_document


@pytest.mark.parametrize(("capability", "is_on"), [((8, 0), True), ((7, 5), False)])
def test_tf32_that_torch_begins_with_is_the_baselines(read, capability, is_on):
    hardware = make_gpu(starts_with_tf32=True, capability=capability)
    assert baseline_config(read({"tf32": False}), 64, make_facts(), hardware).tf32 is is_on


@pytest.mark.parametrize(("hardware", "expands"), [(make_gpu(), True), (make_hardware(), False)])
@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_of_the_users_environment_are_the_baselines(monkeypatch, hardware, expands, variable):
    monkeypatch.setenv(variable, "max_split_size_mb:128,expandable_segments:True")
    assert baseline_config(NOTHING_GIVEN, 64, make_facts(), hardware).expandable_segments is expands


def test_arguments_are_parted_into_what_is_searched_and_what_stays(read):
    arguments = read({"optim": "adafactor", "learning_rate": 1e-4, "output_dir": "out", "run_name": "mine"})
    assert arguments.searched == {"optim": "adafactor"}
    assert arguments.fixed == {"learning_rate": 1e-4}


def test_global_batch_is_micro_batch_times_accumulation(read):
    assert read(b"\xef\xbb\xbf{}").global_batch_size == 8  # behind a byte-order mark
    assert read({"gradient_accumulation_steps": 3}).global_batch_size == 24
    assert read({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 16}).global_batch_size == 64


@pytest.mark.parametrize("name", [None, *RECIPES])
def test_the_files_of_the_libraries_own_making_can_be_read(read, tmp_path, name):
    recipe = None
    if name is not None:
        pytest.importorskip("trl")
        recipe = Recipe(name=name, prompt_length=8, completion_length=8)
    make = functools.partial(arguments_class(recipe), str(tmp_path), use_cpu=True)
    written = make(learning_rate=3e-4, hub_token="secret")
    arguments = read(written.to_json_string())
    check_arguments({**arguments.searched, **arguments.fixed}, "args.json", recipe)
    again = make(**arguments.fixed)
    assert (again.to_json_string(), again.hub_token) == (written.to_json_string(), None)
    config, usual = baseline_config(arguments, 8, make_facts(), make_hardware()), {} if name is None else OF_TRL
    if name == "kto":
        usual = usual | {"train_sampling_strategy": "sequential"}
    kept = {"attn_implementation": "sdpa", "dataloader_pin_memory": False, "optim": written.optim}
    assert config == TrainConfig(per_device_train_batch_size=8, **kept, **usual)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("dpo", {"beta": "x"}, 'beta: expected a number, not "x"'),
        ("dpo", {"loss_type": "ipo", "bta": 1}, "'bta' is no argument of the installed DPOConfig (did you mean 'beta'"),
        ("dpo", {"loss_type": ["ipo"], "loss_weights": [1, 2]}, "loss_weights: `loss_weights` must have the same"),
        ("grpo", {"num_generations": 1}, "num_generations: GRPO requires at least 2 generations"),
    ],
    ids=str,
)
def test_a_value_that_trl_does_not_take_is_named(name, given, said):
    with pytest.raises(InputError) as error:
        check_arguments(given, "args.json", Recipe(name=name, prompt_length=8, completion_length=8))
    assert str(error.value).startswith(f"args.json: {said}")


def test_knobs_that_are_arguments_of_trl_are_the_baselines(read):
    given = {"steps_per_generation": 2, "pad_to_multiple_of": 16, "precompute_ref_log_probs": True}
    found = baseline_config(read({"per_device_train_batch_size": 4, **given}), 16, make_facts(), make_gpu())
    assert (found.generation_batch_size, found.pad_to_multiple_of, found.precompute_ref_log_probs) == (8, 16, True)


def zero(**changed: object) -> dict[str, object]:
    return {"deepspeed": ZERO | changed}


ON_ONE_DEVICE = [
    ("{", "not JSON"),
    (b"\xff\xfe\x00", "not JSON"),
    ("[1]", "expected a JSON object"),
    ('"fast"', "expected a JSON object"),
    ('{"fsdp": "full_shard"}', "fsdp: one device has nothing to split; remove it, or use --devices N"),
    ('{"deepspeed": "zero.json"}', "deepspeed zero.json: "),
    ('{"deepspeed": {"zero_optimization": {"stage": 2}}}', "deepspeed: one device has nothing to split"),
    ('{"auto_find_batch_size": true}', "auto_find_batch_size: it would change the batch"),
    ('{"use_vllm": true}', "use_vllm: transformers generates in trials; remove it"),
    ('{"num_iterations": 2}', "num_iterations: a step is a whole cycle"),
    ('{"num_generations": 0}', "num_generations: expected a whole number above 0, not 0"),
    ('{"no_cuda": true}', "no_cuda: transformers 5 calls it use_cpu"),
    ('{"per_device_train_batch_size": 0}', "per_device_train_batch_size: expected a whole number above 0, not 0"),
    ('{"per_device_train_batch_size": true}', "expected a whole number above 0, not True"),
    ('{"per_device_train_batch_size": null}', "expected a whole number above 0, not None"),
    ('{"gradient_accumulation_steps": "4"}', "gradient_accumulation_steps: expected a whole number above 0"),
    ('{"bf16": true, "fp16": true}', "bf16 and fp16 are both set"),
    ('{"optim": "adamw_trch"}', "optim: transformers has no optimizer 'adamw_trch' (did you mean 'adamw_torch'"),
    ('{"optim": "adamw_hf"}', "optim: adamw_hf is gone from transformers 5; use adamw_torch"),
    ('{"optim": null}', "optim: "),
    ('{"dataloader_num_workers": -1}', "dataloader_num_workers: "),
    ('{"dataloader_num_workers": "many"}', "dataloader_num_workers: "),
]
# Settings of a library that no configuration has.
ON_TWO_DEVICES = [
    (zero(optimizer={"type": "AdamW"}), "deepspeed: optimizer: is not among the settings that are searched"),
    (zero(zero_optimization={"stage": 3, "zero_hpz_partition_size": 8}), "deepspeed: zero_hpz_partition_size: "),
    (zero(fp16=True), "deepspeed: fp16 is enabled there alone"),
    (zero(bf16={"enabled": True}), "deepspeed: bf16 is enabled there alone"),
    (zero(zero_optimization={"stage": 0}), "expected a zero_optimization of stage 1, 2 or 3"),
    (zero(zero_optimization=[2]), "expected a zero_optimization of stage 1, 2 or 3"),
    (zero(zero_optimization={"stage": [2]}), "expected a zero_optimization of stage 1, 2 or 3"),
    (zero(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}), "offload to none and nvme isn't"),
    ({"fsdp": "hybrid_shard"}, "fsdp: hybrid_shard: is not among the settings that are searched; remove it"),
    ({"fsdp": True, "fsdp_config": {"version": 1, "limit_all_gathers": True}}, "limit_all_gathers, version: is not"),
    ({"fsdp": True, "fsdp_config": {"min_num_params": 2000}}, "min_num_params: is not among the settings"),
    ({"fsdp": True, "fsdp_config": {"reshard_after_forward": 8}}, "reshard_after_forward: is not"),
    (
        {"fsdp": True, "fsdp_config": "fsdp.json"},
        'fsdp_config: expected an object of FSDP\'s settings, not "fsdp.json"',
    ),
]


@pytest.mark.parametrize(
    ("devices", "given", "said"), [*((1, *row) for row in ON_ONE_DEVICE), *((2, *row) for row in ON_TWO_DEVICES)]
)
def test_what_can_not_be_honoured_is_refused_in_one_line_that_names_the_file(read, tmp_path, devices, given, said):
    with pytest.raises(InputError) as error:
        baseline_config(read(given), 64, make_facts(), make_gpu(count=devices))
    assert str(error.value).startswith(f"--baseline {tmp_path / 'args.json'}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_switches_that_are_off_are_no_reason_to_refuse(read):
    assert read({"fsdp": "", "deepspeed": None, "auto_find_batch_size": False}).fixed == {}


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"fsdp": True}, {"sharding": "fsdp_full"}),
        ({"fsdp": "full_shard auto_wrap"}, {"sharding": "fsdp_full"}),
        ({"fsdp": ["shard_grad_op", "offload"]}, {"sharding": "fsdp_grad_op", "offload": "parameters"}),
        ({"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": "false"}}, {"sharding": "fsdp_grad_op"}),
        ({"fsdp": False, "fsdp_config": {"version": 1}, "ddp_bucket_cap_mb": 8}, {"ddp_bucket_cap_mb": 8}),
        ({"ddp_find_unused_parameters": False}, {"ddp_find_unused_parameters": False}),
        ({"ddp_broadcast_buffers": False}, {"ddp_broadcast_buffers": False}),
        ({"deepspeed": {"zero_optimization": {"stage": 1}, "steps_per_print": 9}}, {"sharding": "zero_1"}),
        ({"deepspeed": '{"zero_optimization": {"stage": 2}}'}, {"sharding": "zero_2"}),
        ({"deepspeed": ZERO | {"train_batch_size": "auto"}}, {"sharding": "zero_3", "offload": "parameters"}),
        ({}, {}),
    ],
)
def test_the_baseline_of_several_devices_is_fsdp_or_zero_if_the_arguments_ask_for_it_else_ddp(read, given, asked):
    check_arguments(given, "args.json")
    found = baseline_config(read(given), 16, make_facts(), make_gpu(count=2))
    assert found.parallelism == Parallelism(world_size=2, **asked)


@pytest.mark.parametrize("kind", ["object", "text", "file"])
def test_a_micro_batch_that_is_dealt_out_to_all_devices_is_refused(read, kind, tmp_path):
    settings, file = {"split_batches": True}, tmp_path / "accelerate.json"
    file.write_text(json.dumps(settings))
    given = read({"accelerator_config": {"object": settings, "text": json.dumps(settings), "file": str(file)}[kind]})
    assert baseline_config(given, 16, make_facts(), make_gpu(count=1)).parallelism.is_single
    with pytest.raises(InputError, match="split_batches deals a micro-batch out to all devices; remove it"):
        baseline_config(given, 16, make_facts(), make_gpu(count=2))


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("as_file", [True, False])
def test_a_deepspeed_configuration_that_a_search_writes_is_read_as_what_it_means(read, tmp_path, offload, as_file):
    spread = Parallelism(world_size=2, sharding="zero_2", offload=offload)
    config = make_config(4, parallelism=spread, precision="bf16")
    written = training_plan(config, make_workload(global_batch_size=8), make_gpu(count=2)).tuned["deepspeed"]
    if as_file:
        (tmp_path / "zero.json").write_text(json.dumps(written))
    given = {"bf16": True, "deepspeed": str(tmp_path / "zero.json") if as_file else written}
    found = baseline_config(read(given), 8, make_facts(), make_gpu(count=2))
    assert (found.parallelism, found.precision) == (spread, "bf16")


@pytest.mark.parametrize("wrapping", ["layers", "size"])
@pytest.mark.parametrize("offload", ["none", "parameters"])
@pytest.mark.parametrize(("sharding", "checkpointing"), [("fsdp_full", "none"), ("fsdp_grad_op", "full")])
def test_arguments_of_fsdp_that_a_search_writes_are_read_as_what_they_mean(
    read, tmp_path, sharding, offload, wrapping, checkpointing
):
    spread = Parallelism(world_size=2, sharding=sharding, offload=offload, wrapping=wrapping)
    config = make_config(4, parallelism=spread, checkpointing=checkpointing)
    written = training_plan(config, make_workload(global_batch_size=8), make_gpu(count=2)).tuned
    asked = {name: written[name] for name in ("fsdp", "fsdp_config")}
    as_made = TrainingArguments(str(tmp_path), **asked).to_dict()  # with the library's own defaults
    for given in (asked, {name: as_made[name] for name in asked}):
        found = baseline_config(read(given), 8, make_facts(), make_gpu(count=2))
        assert (found.parallelism, found.checkpointing) == (spread, checkpointing)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learning_rate": "fast"}, 'learning_rate: expected a number, not "fast"'),
        ({"lr_scheduler_type": "sideways"}, "lr_scheduler_type: expected linear, cosine, "),
        ({"adam_beta1": 5}, "adam_beta1: Invalid beta parameter"),
        ({"learning_rate": 1e-4, "weight_decay": -1}, "weight_decay: Invalid weight_decay"),
        ({"lr_scheduler_kwargs": {"speed": 1}}, "lr_scheduler_kwargs: "),
        ({"max_grad_norm": -1}, "max_grad_norm: expected 0 or more"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "waits for evaluations"),
        ({"bf16": "perhaps"}, "bf16: expected true or false"),
        ({"optim": "adamw_torc"}, "(did you mean 'adamw_torch'"),
        ({"evaluation_strategy": "no"}, "is no argument of the installed TrainingArguments (did you mean"),
    ],
)
def test_a_value_that_no_training_takes_is_named(given, said):
    with pytest.raises(InputError) as error:
        check_arguments(given, "args.json")
    assert str(error.value).startswith("args.json: ")
    assert said in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "given",
    [
        {"ddp_backend": "gloo", "ddp_timeout": 60, "learning_rate": 1},
        {"bf16": True, "tf32": True, "bf16_full_eval": True, "torch_compile": True},
        {"eval_strategy": "steps", "load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 500},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}, "warmup_steps": 0.1},
        {"lr_scheduler_type": "constant", "neftune_noise_alpha": 5, "weight_decay": 0},
        {"optim": "adamw_bnb_8bit", "report_to": ["wandb"], "push_to_hub": True, "label_names": ["labels"]},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ],
    ids=str,
)
def test_what_the_libraries_take_is_taken(given):
    check_arguments(given, "args.json")


@pytest.mark.parametrize(
    ("global_batch", "micro_batch"), [(None, 8), (64, 8), (8, 8), (6, 6), (12, 6), (7, 7), (11, 1), (1, 1), (20, 5)]
)
def test_the_default_micro_batch_is_the_largest_up_to_the_trainers_that_divides_the_global_batch(
    global_batch, micro_batch
):
    config = baseline_config(NOTHING_GIVEN, global_batch, make_facts(), make_gpu())
    assert config.per_device_train_batch_size == micro_batch


def test_without_arguments_the_baseline_is_the_trainers_defaults():
    config = baseline_config(NOTHING_GIVEN, 64, make_facts(attn_implementations=("eager", "sdpa")), make_gpu())
    assert config == TrainConfig(per_device_train_batch_size=8, attn_implementation="eager")
    assert (
        baseline_config(NOTHING_GIVEN, 64, make_facts(attn_implementations=()), make_gpu()).attn_implementation is None
    )


def test_without_an_accelerator_nothing_is_pinned_or_moved_from_it_and_there_is_no_cache_to_empty(read):
    arguments = read({"torch_empty_cache_steps": 4})
    assert arguments.fixed == {}
    for hardware, pins, steps in ((make_gpu(), True, 4), (make_hardware(), False, None)):
        found = baseline_config(arguments, 8, make_facts(), hardware)
        assert (found.dataloader_pin_memory, found.torch_empty_cache_steps) == (pins, steps)
    moving = read({"activation_offloading": True})
    assert baseline_config(moving, 8, make_facts(), make_gpu())
    with pytest.raises(InputError, match="activation_offloading: moves activations from a GPU, and this is a CPU"):
        baseline_config(moving, 8, make_facts(), make_hardware())


@pytest.mark.parametrize(
    ("document", "field", "value"),
    [
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size", 2), ({"bf16": True}, "precision", "bf16"),
        ({"fp16": True}, "precision", "fp16"), ({"tf32": True}, "tf32", True), ({"optim": "sgd"}, "optim", "sgd"),
        ({"gradient_checkpointing": True}, "checkpointing", "full"),
        ({"activation_checkpointing": True}, "checkpointing", "full"),
        ({"torch_compile": True}, "torch_compile_backend", "inductor"),
        ({"torch_compile_backend": "cudagraphs"}, "torch_compile_backend", "cudagraphs"),
        ({"dataloader_num_workers": 4}, "dataloader_num_workers", 4),
        ({"dataloader_pin_memory": False}, "dataloader_pin_memory", False),
    ],
)  # fmt: skip
def test_the_users_arguments_become_the_baselines_knobs(read, document, field, value):
    default, changed = (baseline_config(read(d), 64, make_facts(), make_gpu()) for d in ({}, document))
    assert getattr(default, field) != value
    assert changed == default.model_copy(update={field: value})
