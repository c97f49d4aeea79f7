"""Real trials of scripts of a user's own, each described before; when a trial ends, and which losses count."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from factories import make_config, make_hardware, make_limits, make_plan, make_request
from own_trainings import LLAMA_SCRIPT, SCRIPT, quiet_arguments, script
from profiles import make_family
from torch import nn
from transformers import Trainer

from autotune.errors import InputError, MachineError
from autotune.estimates.forecast import TRACING, TraceRequest, Traces
from autotune.execution.job import ENDS_VARIABLE
from autotune.execution.trial import Trial, watch_losses
from autotune.training.baseline import UserArguments, baseline_config
from autotune.value import read_value
from autotune.values.budget import Budget, Effort, LossTask, SoakTask
from autotune.values.model import Task
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import DescribeRequest, Purpose, TrialStatus
from autotune.values.workload import Held, Workload

GUARD = SimpleNamespace(relax=None, step_ended=None, retries=None)


class Echo(nn.Module):
    """Its loss is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return {"loss": self.weight * 0 + x.sum()}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_single_loss_that_is_no_number_is_seen_though_the_trainer_hides_it(bad, tmp_path):
    arguments = quiet_arguments(tmp_path, max_steps=3, per_device_train_batch_size=1)
    trainer = Trainer(Echo(), arguments, train_dataset=[{"x": torch.tensor(loss)} for loss in (2.0, bad, 2.0)])
    total = watch_losses(trainer)
    assert math.isfinite(trainer.train().training_loss)
    assert not math.isfinite(total())


def test_a_micro_step_that_is_left_out_is_not_computed_and_has_the_loss_of_the_one_before(tmp_path):
    arguments = quiet_arguments(tmp_path, max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    model, computed = Echo(), []
    model.register_forward_hook(lambda module, inputs, outputs: computed.append(float(outputs["loss"].detach())))
    rows, leaves_out = [{"x": torch.tensor(x)} for x in (1.0, 2.0, 4.0, 8.0)], iter([False, True, True, False])
    trainer = Trainer(model, arguments, train_dataset=rows)
    total = watch_losses(trainer, leaves_out=lambda: next(leaves_out))
    trainer.train()
    assert len(computed) == 2
    assert total() == pytest.approx((3 * computed[0] + computed[1]) / 4)


@pytest.mark.parametrize(("task", "ends_at"), [(None, 998.5), (LossTask(steps=20, pass_steps=4, seed=0), math.inf)])
def test_measuring_ends_before_the_process_is_killed_and_a_check_runs_all_its_steps(
    monkeypatch, tmp_path, task, ends_at
):
    monkeypatch.setenv(ENDS_VARIABLE, "1000.5")
    request = make_request(accumulation_steps=2, limits=make_limits(timeout_s=60.0), task=task)
    assert Trial(request, tmp_path, Stopwatch("prepare_s"), GUARD, None).timer.ends_at == ends_at


@pytest.mark.parametrize(("purpose", "least_s"), [(Purpose.SEARCH, 2.0), (Purpose.FINAL, 5.0)])
def test_steps_of_2_ms_are_enough_for_the_least_measuring_time_which_finals_have_more_of(purpose, least_s, tmp_path):
    plan, soak = make_plan(budget=Budget.of(Effort.STANDARD)), SoakTask(eval_batch_sizes=(1,))
    request = plan.request_of(plan.baseline, purpose, number=1, timeout_s=60.0)
    assert request.limits.least_time_s == least_s
    assert 0.002 * Trial(request, tmp_path, Stopwatch("prepare_s"), GUARD, None).max_steps >= least_s
    assert plan.request_of(plan.baseline, purpose, number=1, timeout_s=60.0, task=soak).limits.least_time_s == 0.0


@pytest.mark.parametrize(("devices", "micro_steps"), [(1, 2), (2, 3)])
def test_a_trial_runs_a_micro_step_that_neither_writes_gradients_nor_exchanges_them(devices, micro_steps):
    config = make_config(1, parallelism={"world_size": devices})
    request = make_plan().request_of(config, Purpose.SEARCH, number=1, timeout_s=60.0)
    assert request.accumulation_steps == micro_steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("own")


QUIET = ("--output_dir", "out", "--use_cpu", "True")


def described(bench, code):
    """Return the description of the code, and the workload that follows from it."""
    workload = Workload(model=bench._model, task=Task.OWN, sequence_length=1, global_batch_size=None, own_code=code)
    description = bench.runner.describe(DescribeRequest(workload=workload))
    found = description.own
    names = ("barred", "weights", "reorders", "pads", "normalizes", "checkpoints", "own_loss")
    known = {name: getattr(found, name) for name in names}
    fields = {"model": found.spec, "task": found.task, "sequence_length": found.sequence_length, "global_batch_size": 8}
    own = {"lengths": description.lengths, "own_code": code.model_copy(update=known)}
    return description, workload.model_copy(update=fields | own)


def holding(workload, held):
    return workload.model_copy(update={"own_code": workload.own_code.model_copy(update={"held": held})})


def run(bench, workload, *, purpose=Purpose.SEARCH, task=None, limits=None, **config):
    config = {"attn_implementation": None, "optim": "adamw_torch", **config}
    request = bench.request(config=config, limits=limits)
    fields = {"workload": workload, "accumulation_steps": workload.accumulation_steps(request.config)}
    return bench.runner.run(request.model_copy(update={**fields, "purpose": purpose, "task": task}))


def measured(bench, workload, **fields):
    result = run(bench, workload, **fields)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    return result.outcome


@pytest.fixture(scope="module")
def net(bench, folder):
    """A module with a loss of its own in a subclass of Trainer, which evaluates, saves and logs at every step."""
    busy = ("--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1")
    code = script(folder, SCRIPT, *QUIET, "--learning_rate", "0.25", "--resume_from_checkpoint", "out", *busy)
    return described(bench, code.model_copy(update={"launched": {"bf16": True}}))


@pytest.fixture(scope="module")
def llama(bench, folder):
    return described(bench, script(folder, LLAMA_SCRIPT, *QUIET, name="llama.py"))


@pytest.mark.parametrize("can_be_read", [True, False])
def test_texts_of_which_the_collator_makes_tokens_are_ordered_by_these_or_have_no_known_lengths(
    bench, tmp_path, can_be_read
):
    begun = "def collate(samples):"
    ids = f'{begun}\n    samples = [{{"input_ids": s["ids"]}} for s in samples]\n'
    text = LLAMA_SCRIPT.replace('{"input_ids": rows, "text": ["unused"] * len(rows)}', '{"ids": rows}')
    text = text.replace(begun, ids if can_be_read else f"{ids}    assert len(samples) <= 16\n")
    description, workload = described(bench, script(tmp_path, text, *QUIET, "--remove_unused_columns", "False"))
    (barred,) = (bar for bar in description.own.barred if bar.knob == "train_sampling_strategy")
    assert "no input_ids" in barred.reason
    assert workload.own_code.reorders == can_be_read
    assert any("can't be read: trials keep that order" in n for n in description.notes) != can_be_read
    known = workload.lengths
    assert (None if known is None else (known.samples, known.maximum)) == ((96, 47) if can_be_read else None)


def test_a_module_of_ones_own_is_described(net):
    description, _ = net
    found, facts = description.own, description.facts
    assert (found.task, found.spec.name) == (Task.OWN, "Net")
    assert found.not_predicted is None
    assert facts.parameters == 16 * 32 + 32 + 32 * 4 + 4
    assert (facts.batch_coupled, facts.split_changes) == (None, None)
    assert {"adapter", "attn_implementation", "quantization"} <= found.held.keys()
    assert found.fixed == {
        "learning_rate": 0.25, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "do_eval": True,
        "remove_unused_columns": False,
    }  # fmt: skip
    assert (found.arguments["per_device_train_batch_size"], found.arguments["bf16"]) == (8, True)


def traces(bench, workload, *precisions):
    families = tuple(make_family(attn_implementation=None, autocast=autocast) for autocast in precisions)
    asked = TraceRequest(workload=workload, families=families, parameters=1, limit_s=60.0)
    return families, read_value(Traces, bench.runner.ask("trace", TRACING, asked, timeout_s=120.0) / "answer.json")


@pytest.mark.slow
def test_a_module_of_ones_own_is_not_traced_where_its_batches_have_no_row_for_each_sample(bench, tmp_path):
    rows = "lambda rows: {'features': torch.ones(1, 16), 'labels': torch.ones(1).long()}"
    joined = SCRIPT.replace("train_dataset=Rows()", f"train_dataset=Rows(), data_collator={rows}")
    _, workload = described(bench, script(tmp_path, joined, *QUIET))
    said = "Net: can't be traced, so there is no prediction: batches don't have a row for each sample"
    assert traces(bench, workload, None)[1].failures == (said,)


def test_a_module_of_ones_own_is_traced_with_its_loss_on_batches_of_its_data(bench, net):
    description, workload = net
    families, answer = traces(bench, workload, None, "bfloat16")
    assert (answer.failures, [profile.family for profile in answer.profiles]) == ((), [*families])
    for profile in answer.profiles:
        assert profile.trained_elements == description.facts.parameters
        # Of a sample: the products of both layers, and of their gradients but that of the inputs.
        assert profile.needed(1, 1) == 2 * (16 * 32 * 2 + 32 * 4 * 3)


def test_knobs_take_effect_in_a_script_that_stays_as_it_is(bench, net, folder):
    result = run(bench, net[1], per_device_train_batch_size=4, precision="bf16", dataloader_num_workers=1)
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert result.outcome.accumulation_steps == 2
    assert result.outcome.effects["precision"] == "weights float32, layer outputs bfloat16"
    assert result.outcome.effects["dataloader_num_workers"] == "1"
    assert math.isfinite(result.outcome.loss)
    log = (bench.directory(result) / "log.txt").read_text()
    assert "arguments: ['--output_dir', 'out'" in log
    assert "trained to step" not in log
    assert not (folder / "out").exists()


def test_a_script_under_a_launcher_finds_its_variables_while_it_is_looked_at_alone(bench, tmp_path):
    reading = f"import os\nassert (os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE']) == ('0', '1')\n{SCRIPT}"
    joins = "from torch import distributed\ndistributed.init_process_group('gloo')\ntry:\n    trainer.train()\n"
    reading = reading.replace("trainer.train()\n", f"{joins}finally:\n    distributed.destroy_process_group()\n")
    launched = script(tmp_path, reading, *QUIET).model_copy(update={"launched": {}})
    assert described(bench, launched)[0].own.spec.name == "Net"


def test_a_collator_that_pads_to_a_multiple_is_told_to(bench, llama, tmp_path):
    assert llama[0].own.held["pad_to_multiple_of"] == "your data collator pads as it does"
    kind = "type('Padder', (), {'pad_to_multiple_of': None, '__call__': lambda self, rows: collate(rows, self)})()"
    text = LLAMA_SCRIPT.replace("data_collator=collate", f"data_collator={kind}")
    only = "assert 'text' not in samples[0]"  # the Trainer has removed what the model doesn't take
    head = f"def collate(samples, how):\n    {only}\n    step = how.pad_to_multiple_of or 1"
    text = text.replace("def collate(samples):", head)
    text = text.replace("for s in samples)\n", "for s in samples)\n    longest = -(-longest // step) * step\n", 1)
    description, workload = described(bench, script(tmp_path, text, *QUIET))
    assert "pad_to_multiple_of" not in description.own.held
    seen = [measured(bench, workload, pad_to_multiple_of=multiple) for multiple in (None, 64)]
    assert [one.effects["pad_to_multiple_of"] for one in seen] == ["to the longest", "to multiples of 64"]
    assert seen[1].loss == pytest.approx(seen[0].loss, rel=1e-4)


@pytest.mark.slow
def test_a_model_of_the_library_is_described_as_such_and_can_be_predicted(llama):
    description, workload = llama
    assert (workload.task, workload.model.model_type) == (Task.CAUSAL_LM, "llama")
    assert description.own.not_predicted is None
    assert (description.own.pads, description.own.normalizes, description.own.reorders) == (True, True, True)
    assert description.lengths.samples == 96
    assert description.lengths.maximum < 48
    assert workload.sequence_length == description.lengths.maximum
    assert description.facts.attn_implementations[0] == "sdpa"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "effects"),
    [
        ({"attn_implementation": "eager"}, {"attn_implementation": "eager"}),
        ({"checkpointing": "full"}, {"checkpointing": "8 checkpointed calls in the first step"}),
        ({"precision": "pure_bf16"}, {"precision": "weights bfloat16, layer outputs bfloat16"}),
        ({"adapter": {"rank": 4}}, {"adapter": "lora, 4096 of 30880 parameters trained"}),
        ({"optim": "adafactor"}, {"optim": "transformers.optimization.Adafactor"}),
    ],
    ids=str,
)
def test_each_knob_takes_effect_on_a_model_that_is_made_already(bench, llama, config, effects):
    seen = measured(bench, llama[1], **{"attn_implementation": "sdpa", **config}).effects
    assert seen == {**seen, **effects}


TWO = {"world_size": 2}


def test_a_step_of_two_ranks_of_a_script_has_the_losses_of_one_process(bench, llama):
    """The samples of a step are the same, dealt to two, the longest first."""
    task, more = LossTask(steps=6, pass_steps=2, seed=1), {"purpose": Purpose.LOSS_CHECK, "attn_implementation": "sdpa"}
    more["limits"] = {"measure_steps": 10, "relative_interval": 1e-12}
    alone = measured(bench, llama[1], task=task, per_device_train_batch_size=4, **more)
    both = measured(bench, llama[1], task=task, per_device_train_batch_size=2, parallelism=TWO, **more)
    assert both.effects["parallelism"].startswith("DDP over 2")
    assert both.accumulation_steps == 2
    assert both.curve.losses == pytest.approx(alone.curve.losses, rel=1e-5)
    assert len(set(alone.curve.losses)) > 1


def test_a_model_that_the_trainer_makes_on_demand_is_made_once_and_its_losses_are_without_dropout(bench, tmp_path):
    text = SCRIPT.replace("nn.Linear(16, 32)", "nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 32), nn.Dropout(0.5))")
    workload = described(bench, script(tmp_path, text.replace("model=Net()", "model_init=Net"), *QUIET))[1]
    more = {"task": LossTask(steps=4, pass_steps=4, seed=1), "purpose": Purpose.LOSS_CHECK}
    more["limits"] = {"measure_steps": 8, "relative_interval": 1e-12}
    whole, split = (measured(bench, workload, per_device_train_batch_size=size, **more) for size in (8, 2))
    assert split.curve.losses == pytest.approx(whole.curve.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"precision": "bf16", "adapter": {"rank": 4}}], ids=str)
def test_two_ranks_of_a_script_save_and_evaluate(bench, llama, config):
    more = {"purpose": Purpose.SOAK, "attn_implementation": "sdpa", "parallelism": TWO, **config}
    found = measured(bench, llama[1], task=SoakTask(eval_batch_sizes=(4,)), per_device_train_batch_size=2, **more)
    assert found.soaked.eval_batch_size == 4


@pytest.mark.parametrize(
    ("units", "kept"), [("LlamaDecoderLayer", {}), (["LlamaMLP"], {"transformer_layer_cls_to_wrap": ["LlamaMLP"]})]
)
def test_a_script_that_asks_for_fsdp_is_described_in_one_process_with_what_it_asks_for(bench, folder, units, kept):
    settings = {"activation_checkpointing": True, "fsdp_transformer_layer_cls_to_wrap": units}
    asked = ("--fsdp", "full_shard", "--fsdp_config", json.dumps(settings))
    found = described(bench, script(folder, LLAMA_SCRIPT, *QUIET, *asked, name="sharded.py"))[0].own
    assert found.arguments["fsdp"] == "full_shard"
    assert found.arguments["fsdp_config"] == {"activation_checkpointing": True, **kept}
    assert not {"fsdp", "fsdp_config"} & found.fixed.keys()


def test_checkpointing_that_a_script_switches_on_itself_is_its_baselines_and_can_be_switched_off(bench, tmp_path):
    """As peft's `prepare_model_for_kbit_training` does, on which each script of QLoRA is built."""
    text = LLAMA_SCRIPT.replace(
        "trainer = Trainer(\n    model=LlamaForCausalLM(config),",
        "from peft import LoraConfig, get_peft_model\n"
        "model = LlamaForCausalLM(config)\nmodel.gradient_checkpointing_enable()\n"
        "model = get_peft_model(model, LoraConfig(target_modules='all-linear'))\ntrainer = Trainer(\n    model=model,",
    )
    description, workload = described(bench, script(tmp_path, text, *QUIET))
    found = description.own
    assert (found.checkpoints, found.not_predicted, found.adapter is not None) == (True, None, True)
    arguments = UserArguments(found.arguments, found.fixed, "the script")
    assert baseline_config(arguments, 8, description.facts, make_hardware()).checkpointing == "full"
    workload = holding(workload, {knob: Held(value=None, reason=reason) for knob, reason in found.held.items()})
    # two layers of each of four micro-batches
    for checkpointing, effect in (("none", "none"), ("full", "8 checkpointed calls in the first step")):
        assert measured(bench, workload, checkpointing=checkpointing).effects["checkpointing"] == effect


def streaming(samples):
    stream = f"""
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (Rows()[index] for index in range({samples}))

trainer = """
    text = SCRIPT.replace("train_dataset=Rows(), eval_dataset=Rows(8)", "train_dataset=Stream()")
    return text.replace("trainer = ", stream)


def test_a_stream_that_ends_within_its_first_step_is_refused(bench, folder):
    _, workload = described(bench, script(folder, streaming(5), *QUIET, "--max_steps", "9", name="five.py"))
    for size in (4, 8):
        result = run(bench, workload, per_device_train_batch_size=size)
        assert result.status is TrialStatus.INVALID, result.outcome
        assert "5 samples, within the first step of 8" in result.outcome.cause


@pytest.mark.parametrize(("order", "is_held"), [("batch_rebalance", True), ("group_by_length", False)])
def test_an_order_that_a_trial_can_not_make_is_the_codes(bench, tmp_path, order, is_held):
    description, _ = described(bench, script(tmp_path, LLAMA_SCRIPT, *QUIET, "--train_sampling_strategy", order))
    assert description.own.reorders != is_held
    assert ("train_sampling_strategy" in description.own.held) == is_held


def test_callbacks_that_wait_for_evaluations_are_left_out_and_those_that_ask_for_one_get_none(bench, tmp_path):
    patience = (
        "from transformers import EarlyStoppingCallback, TrainerCallback\n\n"
        "class Patience(EarlyStoppingCallback):\n    pass\n\n"
        "class Often(TrainerCallback):\n    def on_step_end(self, args, state, control, **kwargs):\n"
        "        control.should_evaluate = control.should_save = True\n"
        "    def on_init_end(self, args, state, control, **kwargs):\n"
        "        assert args.eval_strategy == args.save_strategy == 'epoch' and args.load_best_model_at_end\n"
        "        assert args.metric_for_best_model == 'loss'\n"
        "    on_train_begin = on_init_end\n"
        "    def on_train_end(self, args, state, control, **kwargs):\n        open(state.best_model_checkpoint)\n"
    )
    best = ("--eval_strategy", "epoch", "--save_strategy", "epoch", "--load_best_model_at_end", "True")
    text = SCRIPT.replace("eval_dataset=Rows(8)", "eval_dataset=Rows(8), callbacks=[Patience(), Often()]")
    text = text.replace("trainer.train()", "trainer.evaluate = trainer._save_checkpoint = None\ntrainer.train()")
    _, workload = described(bench, script(tmp_path, patience + text, *QUIET, *best))
    measured(bench, workload, per_device_train_batch_size=4)


@pytest.mark.slow
def test_samples_that_come_as_a_stream_keep_their_order(bench, tmp_path):
    text = streaming(64).replace("train_dataset=Stream()", "train_dataset=Stream(), eval_dataset=Stream()")
    description, workload = described(bench, script(tmp_path, text, *QUIET, "--max_steps", "5"))
    assert description.own.held["train_sampling_strategy"] == "the samples come as a stream"
    assert workload.own_code.reorders is False
    measured(bench, workload, per_device_train_batch_size=4)
    soak = measured(bench, workload, purpose=Purpose.SOAK, task=SoakTask(eval_batch_sizes=(4,)))
    assert (soak.soaked.eval_batch_size, soak.soaked.not_evaluated is None) == (None, False)


def test_of_several_data_sets_to_evaluate_on_each_is_read_the_longest_samples_first(bench, tmp_path):
    stream = "dataset.to_iterable_dataset()"
    sets = f"{{'many': dataset.select(range(8)), 'news': {stream}, 'one': [{{'input_ids': [5] * 60}}]}}"
    text = LLAMA_SCRIPT.replace("eval_dataset=dataset.select(range(8))", f"eval_dataset={sets}")
    widths = tmp_path / "widths"
    note = f"    print(*(len(s['input_ids']) for s in samples), file=open({str(widths)!r}, 'a'))\n"
    text = text.replace("    longest = max(", f"{note}    longest = max(")
    _, workload = described(bench, script(tmp_path, text, *QUIET, "--remove_unused_columns", "False"))
    soak = measured(bench, workload, purpose=Purpose.SOAK, task=SoakTask(eval_batch_sizes=(4,)))
    assert str(soak.soaked).startswith("not evaluated: news (a stream); evaluation batch 4")
    *_, first, second, last = ([*map(int, line.split())] for line in widths.read_text().splitlines())
    assert ([*first, *second], last) == (sorted([*first, *second], reverse=True), [60])


FAILING = {
    "print('no training here')": "it ended without having called Trainer.train",
    "raise SystemExit(3)": "it ended with exit code 3 without having called",
    "raise SystemExit('no texts')": "it ended: no texts, without having called",
    "import torch\nwhile True: torch.optim.SGD([torch.ones(1)]).step()": "it made 20 optimizer steps without having",
    "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)": "starts processes itself, by torch.multiproc",
    "raise SystemExit(2)": r"options that it lacks or doesn't know \(those of autotune stand before --\), with",
    "import os; os._exit(7)": "ended with exit code 7 before it trained",
    "1 / 0": "failed before it trained: ZeroDivisionError: division by zero",
    "import no_such_module": "ModuleNotFoundError: .*; it runs in the environment of autotune, /",
    "input('Go on? ')": "EOFError: .*; it runs with an empty standard input, so that it can't ask",
}


@pytest.mark.parametrize(("text", "message"), FAILING.items(), ids=str)
def test_a_script_that_does_not_get_to_train_is_refused_with_what_it_did(bench, tmp_path, text, message):
    with pytest.raises(InputError, match=message) as raised:
        described(bench, script(tmp_path, text))
    assert "log.txt" in str(raised.value)


def test_samples_that_are_compared_with_each_other_are_split_though_the_loader_makes_batches_of_its_own_size(
    bench, tmp_path
):
    """As sentence-transformers trains: batches are of `args.train_batch_size`, whatever is asked of the Trainer."""
    own = (
        "class NetTrainer(Trainer):\n"
        "    def get_train_dataloader(self):\n"
        "        size = self.args.train_batch_size\n"
        "        return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, batch_size=size))\n\n"
    )
    text = SCRIPT.replace("class NetTrainer(Trainer):\n", own)
    alike = "cross_entropy(logits @ logits.T, torch.arange(len(logits), device=logits.device))"
    text = text.replace('cross_entropy(logits, inputs["labels"])', alike)
    description, workload = described(bench, script(tmp_path, text, *QUIET))
    assert description.own.reorders is False
    assert "in 1 micro-batch of 4 and" in description.facts.split_changes
    assert traces(bench, workload, None)[1].profiles


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("cusolver error: Unknown cusolver error number, when calling `cusolverDnXgeqrf(...)`", "cusolverDnXgeqrf"),
        ("cuDNN error: not supported by the stand-in. This error may appear if inputs lie apart.", "the stand-in. \\("),
    ],
    ids=["cuSOLVER", "cuDNN"],
)
def test_functions_that_the_stand_in_has_not_are_no_fault_of_the_script(bench, tmp_path, error, said):
    with pytest.raises(MachineError, match=rf"train.py: its memory can't be told without a GPU: .*{said}"):
        described(bench, script(tmp_path, f"raise RuntimeError({error!r})"))


@pytest.mark.slow
@pytest.mark.parametrize("prepared", ["", "self.accelerator.prepare"])
def test_batches_that_do_not_follow_the_arguments_are_refused(bench, tmp_path, prepared):
    loader = f"{prepared}(torch.utils.data.DataLoader(self.train_dataset, batch_size=5))"
    head = "class NetTrainer(Trainer):\n"
    own = SCRIPT.replace(head, f"{head}    def get_train_dataloader(self):\n        return {loader}\n\n")
    with pytest.raises(InputError, match="get_train_dataloader makes batches of 5, whatever per_device"):
        described(bench, script(tmp_path, own, *QUIET))


def test_a_loss_that_the_split_changes_is_measured_in_the_script(bench, tmp_path):
    """A function of one's own that the Trainer trusts to divide by the labels of the step, and that doesn't."""
    mean = "lambda outputs, labels, num_items_in_batch=None: outputs.logits.float().square().mean()"
    own = LLAMA_SCRIPT.replace("trainer = Trainer(", f"trainer = Trainer(\n    compute_loss_func={mean},")
    description, _ = described(bench, script(tmp_path, own, *QUIET))
    assert "in 1 micro-batch of 4 and" in description.facts.split_changes
    assert description.facts.split_changes in " ".join(description.notes)
    assert description.own.normalizes is False


@pytest.mark.slow
def test_an_optimizer_of_the_codes_own_is_held_and_not_looked_at(bench, tmp_path):
    made = "trainer = NetTrainer(model=net, args=args, optimizers=(torch.optim.SGD(net.parameters(), lr=0.1), None),"
    own = SCRIPT.replace("trainer = NetTrainer(model=Net(), args=args,", f"net = Net()\n{made}")
    description, workload = described(bench, script(tmp_path, own, *QUIET))
    assert description.own.held["optim"] == "your code hands the Trainer an optimizer"
    workload = holding(workload, {"optim": Held(value="adamw_torch", reason="its own")})
    assert measured(bench, workload).effects["optim"] == "as your code has it"


STOPS = (
    "trainer.callback_handler.callbacks[0].on_substep_end = "
    "lambda args, state, control, **more: setattr(control, 'should_training_stop', True)"
)
INVALID = {
    "trainer.args.per_device_train_batch_size = 3": "your code sets per_device_train_batch_size again after it has",
    STOPS: "training ended after 0 steps, before one was measured: a callback of your code stopped it",
}


@pytest.mark.parametrize(("late", "cause"), INVALID.items(), ids=["arguments", "stop"])
def test_code_that_makes_its_trial_invalid_is_told_how(bench, tmp_path, late, cause):
    text = SCRIPT.replace("trainer.train()\n", f"{late}\ntrainer.train()\n")
    _, workload = described(bench, script(tmp_path, text, *QUIET))
    result = run(bench, workload, per_device_train_batch_size=4)
    assert result.status is TrialStatus.INVALID
    assert result.outcome.cause.startswith(cause)
