"""Real trials of TRL's Trainers: samples are counted, and what is only scheduled otherwise has the same losses."""

import sys
from unittest.mock import Mock

import pytest
import torch
from corpora import jsonl
from datasets import Dataset

from autotune.errors import InputError
from autotune.training import recipes
from autotune.training.arguments import training_plan
from autotune.training.build import build_model
from autotune.training.resolve import resolve
from autotune.values.budget import LossTask, SoakTask
from autotune.values.config import TrainConfig
from autotune.values.hardware import detect
from autotune.values.trial import DescribeRequest, TrialStatus
from autotune.values.workload import RECIPES, Recipe, Workload

trl = pytest.importorskip("trl")

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL 1.16 asks for it

STEPS = 3
GENERATING = [name for name, kind in RECIPES.items() if kind.generates]
OFFLINE = [name for name in RECIPES if name not in GENERATING]


def recipe_of(name, **fields):
    generations = 4 if RECIPES[name].generates else 1
    return Recipe(**{"name": name, "prompt_length": 8, "completion_length": 8, "generations": generations, **fields})


def fields_of(name, **fields):
    """Return the fields of a workload that a recipe decides."""
    task = RECIPES[name].task
    return {"recipe": recipe_of(name), "task": task, "global_batch_size": 8, "sequence_length": 16, **fields}


def of_one_label(spec):
    """Return the model of a recipe as planning has it, which may learn rewards."""
    return spec.model_copy(update={"config": {**spec.config, "num_labels": 1}})


def run(bench, name, *, task=None, **config):
    workload = {"model": of_one_label(bench.request().workload.model), **fields_of(name)}
    request = bench.request(config={"per_device_train_batch_size": 4, **config}, workload=workload)
    limits = request.limits
    if isinstance(task, LossTask):
        exact = {"discarded_steps": 1, "measure_steps": task.steps, "relative_interval": 1e-12}
        limits = limits.model_copy(update=exact)
    result = bench.runner.run(request.model_copy(update={"task": task, "limits": limits}))
    assert result.status is TrialStatus.COMPLETED, result.outcome
    return result.outcome


ADAPTER = {"adapter": {"kind": "lora", "rank": 4}, "checkpointing": "full", "precision": "bf16"}
SHOWN = {
    "sft": "8 samples", "kto": "8 samples", "dpo": "8 pairs", "reward": "8 pairs",
    **dict.fromkeys(GENERATING, "2 prompts x 4 generations"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_an_adapter_is_trained_alone_on_what_a_step_holds(bench, name):
    effects = run(bench, name, **ADAPTER).effects
    assert effects["recipe"] == f"{SHOWN[name]} a step"
    assert "lora" in effects["adapter"]
    assert effects["precision"].endswith("layer outputs bfloat16")


WHOLE = {"per_device_train_batch_size": 8, "attn_implementation": "eager"}
SPLIT = {"per_device_train_batch_size": 2, "checkpointing": "full", "optim": "adamw_torch"}
BEFORE = {"precompute_ref_log_probs": True}  # the reference is worked out before training


@pytest.mark.parametrize(
    ("name", "configs"),
    [("dpo", (WHOLE, SPLIT, BEFORE)), ("sft", (WHOLE, SPLIT)), ("reward", (WHOLE, SPLIT)), ("kto", ({}, BEFORE))],
)
def test_what_is_scheduled_otherwise_has_the_same_losses(bench, name, configs):
    task = LossTask(steps=4, pass_steps=4, seed=1)
    one, *others = (run(bench, name, task=task, **config).curve.losses for config in configs)
    assert all(other == pytest.approx(one, rel=1e-5) for other in others)
    assert len(set(one)) == 4


@pytest.mark.parametrize("name", OFFLINE)
def test_a_soak_trains_on_what_a_step_holds_saves_a_checkpoint_and_evaluates(bench, name):
    outcome = run(bench, name, task=SoakTask(eval_batch_sizes=(8, 2)))
    assert outcome.effects["recipe"] == f"{SHOWN[name]} a step"
    assert outcome.soaked.checkpoint_bytes > 0
    assert outcome.soaked.eval_batch_size == 8


@pytest.mark.parametrize(
    ("name", "knobs", "reason"),
    [
        ("grpo", {}, "not evaluated, which would generate completions"),
        ("dpo", BEFORE, "not evaluated: the reference ran before training"),
    ],
)
def test_what_is_not_evaluated_is_said(bench, name, knobs, reason):
    soaked = run(bench, name, task=SoakTask(eval_batch_sizes=(2,)), **knobs).soaked
    assert soaked.checkpoint_bytes > 0
    assert str(soaked).startswith(f"{reason}, checkpoint saved (")


@pytest.mark.parametrize("name", GENERATING)
def test_completions_may_be_generated_in_parts(bench, name):
    assert run(bench, name, generation_batch_size=4).effects["recipe"] == f"{SHOWN[name]} a step"


@pytest.fixture
def trainer_of(tiny_llama, tmp_path):
    """Return a function that makes the Trainer of a recipe here."""

    def made(name, config, arguments, **fields):
        workload = Workload(model=of_one_label(resolve(str(tiny_llama))), **fields_of(name, **fields))
        recipes.checked_data(workload, tmp_path / "data")
        config = {"optim": "adamw_torch", "dataloader_pin_memory": False, "attn_implementation": "eager", **config}
        mapping = training_plan(TrainConfig(**config), workload, detect("cpu"))
        arguments = {**mapping.tuned, **mapping.harness, "output_dir": str(tmp_path), **arguments}
        torch.manual_seed(0)
        model = build_model(workload.model, workload.task, device="cpu", **mapping.model)
        how = {"directory": tmp_path / "data", "samples": 64, "distinct": 64, "longest_first": 4}
        return recipes.recipe_trainer(workload, mapping, arguments, model, **how)[0]

    return made


def test_grpo_has_the_same_losses_with_the_same_completions(trainer_of, monkeypatch):
    def generated(self, prompt_ids, *_, **__):  # whatever the weights are
        return [[5] * (1 + i % 4) + p[i % 4 + 1 :] for i, p in enumerate(prompt_ids)], None

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", generated)
    of_run = {"max_steps": STEPS, "learning_rate": 1e-3, "beta": 0.1}
    arguments = {**of_run, "logging_strategy": "steps", "logging_steps": 1}

    def losses(**config):
        trainer = trainer_of("grpo", config, arguments)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        return [entry[name] for entry in logged for name in ("loss", "grad_norm")]

    one = losses(per_device_train_batch_size=8)
    assert losses(per_device_train_batch_size=4, checkpointing="full") == pytest.approx(one, rel=1e-5, abs=1e-6)
    assert len(set(one)) == 2 * STEPS


def test_a_step_with_other_samples_is_refused():
    class Trainer:
        state = type("State", (), {"global_step": 2})

        def training_step(self, model, inputs):
            return 0.0

    trainer = Trainer()
    count = recipes.StepCount(trainer, recipe_of("sft"), 8)
    trainer.training_step(None, {"input_ids": [[1]] * 8})
    with pytest.raises(recipes.NoEffectError, match="8 samples a step were asked for, but 8 samples were trained"):
        count.checked()


def test_rewards_are_imported(tmp_path, monkeypatch):
    code = "def length(completion_ids, **_):\n    return [1.0 for _ in completion_ids]\n"
    (tmp_path / "scores_of_a_user.py").write_text(code)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = recipes.reward_function(recipe_of("grpo", reward="scores_of_a_user:length", directory=str(tmp_path)))
    assert found(completion_ids=[[1], [2]]) == [1.0, 1.0]
    with pytest.raises(InputError, match="--reward scores_of_a_user:missing: AttributeError"):
        recipes.reward_function(recipe_of("grpo", reward="scores_of_a_user:missing", directory=str(tmp_path)))


@pytest.mark.parametrize("name", ["sft", "dpo", "reward", "kto", "grpo"])
def test_a_files_longest_row_comes_first_though_few_rows_are_read(trainer_of, tmp_path, monkeypatch, name):
    monkeypatch.setattr(recipes, "_MOST_ROWS", 8)
    monkeypatch.setattr(recipes, "_LONGEST_ROWS", 2)
    columns = RECIPES[name].columns
    rows = [{c: c * (1 + n % 3) for c in columns} for n in range(200)]
    rows[150][columns[-1] if name != "kto" else "completion"] = "longest " * 6
    if name == "dpo":  # longer altogether, but no row of a batch is
        rows[20].update(chosen="c" * 30, rejected="r" * 30)
    for n, row in enumerate(rows):
        row.update({"label": n % 2 == 0} if name == "kto" else {})
    config = {"per_device_train_batch_size": 4}
    trainer = trainer_of(name, config, {}, dataset=jsonl(tmp_path / "rows.jsonl", rows), sequence_length=128)
    first = trainer.train_dataset[0]
    decode = trainer.processing_class.decode
    texts = [first["prompt"]] if name == "grpo" else [decode(first[c]) for c in first if c.endswith("_ids")]
    assert "longest longest" in " ".join(texts)
    second_step = 4 // fields_of(name)["recipe"].generations  # when there are optimizer states
    assert trainer.train_dataset[second_step] == first


@pytest.mark.parametrize("name", RECIPES)
def test_lengths_are_those_of_a_files_rows_as_trl_reads_them(tiny_llama, tmp_path, name):
    columns = RECIPES[name].columns
    rows = [
        {c: c[0] * (4 + n) for c in columns} | ({"label": n % 2 == 0} if "label" in columns else {}) for n in (0, 9)
    ]
    fields = fields_of(name, dataset=jsonl(tmp_path / "rows.jsonl", rows), sequence_length=20)
    workload = Workload(model=resolve(str(tiny_llama)), **fields)
    lengths, _ = recipes.checked_data(workload, tmp_path / "data")
    # Bytes, and "</s>" and the end that TRL and the tokenizer add: of prompt and completion together, cut at 20, of a
    # pair without a prompt, or of a prompt alone. KTO pairs the short prompt with the long completion as well.
    of_prompt = (4 + 1 + 8, 13 + 1 + 8)
    others = {"reward": (4 + 5, 13 + 5), "kto": (20, 20), "grpo": of_prompt, "rloo": of_prompt}
    shortest, longest = others.get(name, (4 + 4 + 5, 20))
    assert (lengths.samples, lengths.minimum, lengths.maximum) == (2, shortest, longest)


def test_rows_that_are_all_too_long_empty_prompts_and_missing_columns_are_refused(
    bench, tiny_llama, tmp_path, monkeypatch
):
    def checked(name, *rows, **fields):
        given = fields_of(name, dataset=jsonl(tmp_path / "rows.jsonl", rows), **fields)
        return recipes.checked_data(Workload(model=resolve(str(tiny_llama)), **given), tmp_path / name)

    assert checked("sft", {"body": "word"}, fixed_arguments={"dataset_text_field": "body"})[0].samples == 1
    with pytest.raises(InputError, match="all rows are too long"):
        checked("reward", {"chosen": "c" * 30, "rejected": "r" * 30})
    adds_nothing = Mock(side_effect=lambda prompt: {"input_ids": [*prompt.encode()]})
    monkeypatch.setattr(recipes, "tokenizer_of", lambda *_: adds_nothing)
    with pytest.raises(InputError, match="a prompt is empty, from which nothing"):
        checked("grpo", {"prompt": "a"}, {"prompt": ""})
    file = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "choosen": "b", "rejected": "c"}])
    request = bench.request(workload=fields_of("dpo", dataset=file))
    with pytest.raises(InputError, match="dpo needs prompt, chosen, rejected; there is no chosen"):
        bench.runner.describe(DescribeRequest(workload=request.workload))


def test_rows_are_as_long_as_what_becomes_tokens():
    rows = {"prompt": ["ab", "a" * 9], "solution": ["b" * 99, "b"], "tools": [["c"] * 50, []]}
    assert recipes.row_lengths(Dataset.from_dict(rows)).tolist() == [2, 9]
    assert recipes.row_lengths(Dataset.from_dict({"own": ["a", "ab"]})).tolist() == [1, 2]
