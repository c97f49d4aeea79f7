"""A user's code takes what is laid over it, and is left when it has trained; its model is told and fitted."""

import dataclasses

import cloudpickle
import pytest
import torch
from accelerate import Accelerator
from conftest import TINY_LLAMA
from factories import make_config, make_facts, make_hardware, make_workload
from own_trainings import MODULE, planted, script
from peft import AdaLoraConfig, LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from autotune.cost.family import family_of
from autotune.errors import InputError
from autotune.execution import user_code
from autotune.execution.user_code import CodeError, changed_arguments, harness, overlaid, own_values, run_until_training
from autotune.training.adapters import adapter_arguments, own_adapter, put_on
from autotune.training.arguments import training_plan
from autotune.training.baseline import UserArguments, baseline_config
from autotune.training.loss import base_model
from autotune.value import sha256_of
from autotune.values.workload import Held, OwnCode

pytestmark = [
    pytest.mark.usefixtures("here"),
    # peft and users say it by the older name.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]


def overlay(fit=lambda model: model, **arguments):
    return overlaid(lambda _: arguments, fit)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean()}


def trainer_of(args):
    rows = [{"x": torch.ones(2), "labels": torch.tensor(0)}] * 8
    return Trainer(model=Tiny(), args=args, train_dataset=rows)


@dataclasses.dataclass
class Eager(TrainingArguments):
    """Decides for itself what it was not told, as trl's configs do."""

    def __post_init__(self):
        self.bf16 = True
        super().__post_init__()
        self.per_device_train_batch_size = 32


def test_arguments_take_what_is_laid_over_them_and_remember_their_own():
    with overlay(per_device_train_batch_size=2, bf16=True):
        args = TrainingArguments("out", per_device_train_batch_size=16, learning_rate=0.5, use_cpu=True)
    assert (args.per_device_train_batch_size, args.mixed_precision, args.learning_rate) == (2, "bf16", 0.5)
    assert own_values(args) == {"per_device_train_batch_size": 16, "bf16": False}
    assert TrainingArguments("out", use_cpu=True).per_device_train_batch_size == 8


@pytest.mark.parametrize(
    "copied",
    [lambda args: dataclasses.replace(args, seed=1), lambda args: Eager(**args.to_dict())],
    ids=["replace", "TRL"],
)
def test_a_copy_of_arguments_remembers_the_codes_own(copied):
    with overlaid(lambda given: {**harness(given), "bf16": True}):
        args = TrainingArguments("out", use_cpu=True, logging_strategy="epoch", eval_strategy="steps", eval_steps=2)
        others, made = TrainingArguments("others", use_cpu=True), copied(args)
    assert (own_values(others)["logging_strategy"], own_values(made)["logging_strategy"]) == ("steps", "epoch")
    assert (own_values(made)["bf16"], made.bf16, made.eval_strategy) == (False, True, "steps")


def test_arguments_that_code_sets_later_are_laid_over_again_when_it_makes_its_trainer():
    with overlay(per_device_train_batch_size=4, bf16=False):
        args = Eager("out", use_cpu=True)
        args.gradient_accumulation_steps = 3
        assert args.per_device_train_batch_size == 32
        Accelerator(mixed_precision="bf16")  # of the code's own, which gives its Trainer's another precision
        trainer = trainer_of(args)
        precision = trainer.accelerator.mixed_precision
        assert (trainer.args.per_device_train_batch_size, trainer.args.mixed_precision, precision) == (4, "no", "no")
        assert trainer.args.gradient_accumulation_steps == 3
        assert changed_arguments(args) == []
        args.per_device_train_batch_size = 5
        assert changed_arguments(args) == ["per_device_train_batch_size"]


@pytest.mark.parametrize(("schedule", "becomes"), [("reduce_lr_on_plateau", "constant"), ("linear", "linear")])
def test_code_that_has_evaluation_data_only_if_it_is_to_evaluate_keeps_them_and_waits_for_none(schedule, becomes):
    with overlaid(harness):
        own = {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": schedule}
        args = TrainingArguments("out", use_cpu=True, **own)
        rows = None if args.eval_strategy == "no" else [{"x": torch.ones(2), "labels": torch.tensor(0)}] * 2
        trainer = Trainer(model=Tiny(), args=args, train_dataset=[1], eval_dataset=rows)
        assert Trainer(model=Tiny(), train_dataset=[1]).args.save_strategy == "no"  # the arguments are the Trainer's
    assert trainer.eval_dataset == rows
    assert (trainer.args.eval_strategy, args.lr_scheduler_type) == ("no", becomes)
    assert changed_arguments(args) == []


def test_a_model_is_fitted_whether_it_is_given_or_made_on_demand():
    fitted = []
    with overlay(fit=lambda model: fitted.append(type(model)) or model):
        trainer_of(TrainingArguments("out", use_cpu=True))
        Trainer(model_init=lambda: Tiny(), args=TrainingArguments("out", use_cpu=True), train_dataset=[1])
    assert fitted == [Tiny, Tiny]


TRAINS = (
    MODULE
    + """
if __name__ == "__main__":
    from pathlib import Path

    args = TrainingArguments("out", use_cpu=True, report_to="none", max_steps=2, remove_unused_columns=False)
    trainer = NetTrainer(model=Net(), args=args, train_dataset=Rows())
    try:
        trainer.train()
    except Exception:
        Path("handled").touch()
    Path("after").touch()
"""
)


def test_code_runs_up_to_its_training_which_gets_a_trainer_that_trains(tmp_path):
    steps = []

    def on_train(trainer, train):
        train()
        steps.append(trainer.state.global_step)
        return "measured"

    assert run_until_training(script(tmp_path, TRAINS), tmp_path, on_train) == "measured"
    assert steps == [2]
    assert not (tmp_path / "after").exists()
    assert Trainer.train.__module__.startswith("transformers")


@pytest.mark.parametrize("saves", ["trainer.save_model('final')", "__import__('torch').save(0, 'final')"])
def test_a_failure_in_training_does_not_reach_the_handlers_of_code_which_neither_trains_again_nor_saves(
    tmp_path, saves
):
    with pytest.raises(ZeroDivisionError):
        run_until_training(script(tmp_path, TRAINS), tmp_path, lambda trainer, train: 1 / 0)
    assert not (tmp_path / "handled").exists()
    again = TRAINS.replace("except Exception:", "except BaseException:") + "    trainer.train()\n"
    again = again.replace('    Path("after")', f"    finally:\n        {saves}\n    Path('after')")
    calls = []
    assert run_until_training(script(tmp_path, again), tmp_path, lambda trainer, train: calls.append(1)) is None
    assert calls == [1]
    assert not (tmp_path / "final").exists()


def test_a_script_sees_its_own_arguments_directory_and_modules(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    seen = "f'{sys.argv[1:]} {__file__} {os.getcwd()} {beside.VALUE} {__name__}'"
    told = f"import sys, os, pathlib, beside\npathlib.Path('told').write_text({seen})\n"
    with pytest.raises(CodeError, match=r"train.py: it ended without having called Trainer.train.*find\(step="):
        run_until_training(script(tmp_path, told, "--a", "1"), tmp_path, lambda trainer, train: None)
    assert (tmp_path / "told").read_text() == f"['--a', '1'] {tmp_path}/train.py {tmp_path} 7 __main__"


THREE = cloudpickle.dumps(lambda: 3)


@pytest.mark.parametrize(
    ("content", "known", "said"),
    [
        (lambda ran: THREE, sha256_of(THREE), r"make_trainer build returned int; expected a transformers.Trainer"),
        (planted, "", r"own-code\.pkl is not what the search was begun with"),
        (planted, "0" * 64, r"own-code\.pkl is not what the search was begun with"),
    ],
    ids=["no trainer", "unknown", "exchanged"],
)
def test_pickled_code_that_makes_no_trainer_or_was_exchanged_is_refused(tmp_path, content, known, said):
    (tmp_path / "own-code.pkl").write_bytes(content(tmp_path / "ran"))
    code = OwnCode(kind="pickle", shown="make_trainer build", directory=str(tmp_path), sha256=known)
    with pytest.raises(InputError, match=said):
        run_until_training(code, tmp_path, lambda trainer, train: None)
    assert not (tmp_path / "ran").exists()


CODE = OwnCode(kind="script", shown="train.py", command=("train.py",), directory="/", normalizes=True)


@pytest.fixture
def llama():
    return LlamaForCausalLM(LlamaConfig.from_dict(dict(TINY_LLAMA)))


def fit(model, code=CODE, **knobs):
    mapping = training_plan(make_config(**knobs), make_workload(), make_hardware())
    return user_code.fitted(model, mapping, code)


def family(code, **knobs):
    return family_of(make_config(**knobs), make_hardware(), make_workload(own_code=code))


def test_a_model_of_which_code_makes_several_trainers_is_fitted_once_and_not_in_its_rotary_positions(llama):
    made = fit(llama, precision="pure_bf16")
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    assert made.model.rotary_emb.inv_freq.dtype is torch.float32
    once = fit(llama, adapter={"rank": 4})
    again = fit(once, adapter={"rank": 4})
    assert again is once
    assert sum("lora_A" in name for name, _ in again.named_parameters()) == 2 * 7


def test_held_knobs_stay(llama):
    held = {name: Held(value=None, reason="its own") for name in ("precision", "attn_implementation")}
    own = CODE.model_copy(update={"held": held, "normalizes": False})
    made = fit(llama, own, precision="pure_bf16", attn_implementation="eager")
    assert made.dtype is torch.float32
    assert made.config._attn_implementation == "sdpa"
    assert not hasattr(type(made), "_autotune_normalized")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_that_the_code_has_switched_on_is_its_baselines_and_goes_where_it_is_not_asked_for(
    llama, reentrant
):
    written = {"activation_checkpointing": False, "gradient_checkpointing": False}
    assert user_code.checkpointing(llama, written) == {}
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = user_code.checkpointing(llama, written)
    arguments = UserArguments({**written, **found}, {}, "it")
    assert baseline_config(arguments, 8, make_facts(), make_hardware()).checkpointing == "full"
    assert user_code.checkpointing(llama, {**written, "gradient_checkpointing": True}) == {}  # it has been asked for
    own = CODE.model_copy(update={"checkpoints": True})
    assert fit(llama, own, checkpointing="full").is_gradient_checkpointing
    assert not fit(llama, own).is_gradient_checkpointing
    llama.gradient_checkpointing_enable()
    assert fit(llama).is_gradient_checkpointing  # of a code of which that isn't known


def test_a_model_whose_adapter_json_can_not_hold_is_not_traced(llama):
    config = AdaLoraConfig(init_r=6, target_r=4, total_step=100, target_modules="all-linear")
    without_defaults = get_peft_model(LlamaForCausalLM(llama.config), config)
    assert own_adapter(without_defaults) is None
    assert user_code.not_traced(without_defaults, llama) is not None
    model = get_peft_model(llama, LoraConfig(r=4, target_modules="all-linear"))
    next(p for n, p in model.named_parameters() if "norm" in n).requires_grad_(True)
    assert user_code.not_traced(model, llama) == "weights are trained beside those of the adapter"
    model.add_adapter("other", LoraConfig(r=4, target_modules="all-linear"))
    assert "several adapters" in user_code.not_traced(model, llama)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_an_adapter_of_the_codes_own_is_told_so_that_it_can_be_put_on_again(llama, targets):
    before = user_code.counts_of(llama)
    config = LoraConfig(r=4, lora_alpha=3, target_modules=targets, init_lora_weights="pissa", task_type="CAUSAL_LM")
    model = get_peft_model(llama, config)
    assert user_code.not_traced(model, llama) is None
    assert user_code.counts_of(model) == {**before, "frozen_parameters": before["parameters"]}
    code = CODE.model_copy(update={"adapter": own_adapter(model)})
    again = put_on(LlamaForCausalLM(llama.config), adapter_arguments(family(code).adapter))
    shapes = [{n: p.shape for n, p in m.named_parameters() if p.requires_grad} for m in (model, again)]
    assert shapes[0] == shapes[1]
    assert base_model(model).model.layers[0].mlp.down_proj.scaling == {"default": 0.75}
    assert base_model(again).model.layers[0].mlp.down_proj.scaling == {"default": 0.75}


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({"load_in_8bit": True}, "int8"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4-double"),
    ],
    ids=["int8", "nf4"],
)
def test_packed_weights_are_those_of_the_family_and_the_others_have_the_type(llama, tmp_path, options, packed):
    llama.save_pretrained(tmp_path)
    how = BitsAndBytesConfig(**options)
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=how, dtype="bfloat16")
    assert (user_code.weights_of(model), user_code.quantization(model)) == ("bfloat16", packed)
    assert user_code.counts_of(model)["parameters"] == user_code.counts_of(llama)["parameters"]
    assert user_code.not_traced(model, model) == "the model has packed weights and no adapter"
    model = prepare_model_for_kbit_training(model)
    assert user_code.weights_of(model) == "float32"
    wrapped = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    assert user_code.not_traced(wrapped, base_model(wrapped)) is None
    code = CODE.model_copy(update={"quantization": packed, "weights": "float32"})
    assert (family(code).quantization, family(code).dtype) == (packed, "float32")


def test_weights_in_16_bits_stay_so_under_autocast():
    code = CODE.model_copy(update={"weights": "bfloat16"})
    found = family(code, precision="bf16")
    assert (found.dtype, found.autocast) == ("bfloat16", "bfloat16")
    assert family_of(make_config(precision="bf16"), make_hardware()).dtype == "float32"


def test_deepspeed_is_told_of_the_processes_of_a_cpu(tmp_path, monkeypatch):
    deepspeed, told = pytest.importorskip("deepspeed"), []
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **how: told.append(how))
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with overlaid(lambda _: {"deepspeed": {"zero_optimization": {"stage": 3}}}):
        TrainingArguments(str(tmp_path), use_cpu=True)
    assert told == [{"dist_backend": "gloo"}]
