"""Whether the losses of two trainings are those of the same: the criterion, and real faults planted in a tiny T5."""

import math
import re

import pytest
import torch
from factories import installed_arguments, make_config, make_facts, make_problem, make_workload
from own_trainings import quiet_arguments
from peft import LoraConfig, get_peft_model
from tiny_models import T5
from transformers import T5Config, T5ForConditionalGeneration, Trainer

from autotune.execution.checking import Reading, arguments_of, around_training, findings
from autotune.space.knobs import changes
from autotune.training.dataset import repeated, training_data
from autotune.training.loss import normalize_loss
from autotune.values.budget import LossCurve, LossTask
from autotune.values.config import Parallelism, Precision
from autotune.values.model import Task
from autotune.verification.loss_check import compare

BASE = make_config(8)
RESPLIT = make_config(4)
ROUNDED = make_config(precision="bf16")
OTHER_OPTIMIZER = make_config(optim="adafactor")
OTHER_METHOD = make_config(adapter={"kind": "lora"})


def falling(by: float = 0.5, *, start: float = 6.0, steps: int = 20, off: float = 0.0) -> LossCurve:
    """A straight line from `start` down."""
    losses = tuple(start - by * step / (steps - 1) + (off if step else 0.0) for step in range(steps))
    return LossCurve(losses=losses, dropout_spread=0.0)


def judged(curve, config=RESPLIT, *, reference=None, again=None, batch_coupled=None):
    reference, facts = reference or falling(), make_facts(batch_coupled=batch_coupled)
    changed = changes(config, make_problem(baseline=BASE, facts=facts))
    return compare(reference, again or reference, curve, changed, facts, 4)


SHARDED_FP32 = make_config(8, parallelism=Parallelism(world_size=2, sharding="fsdp_full"))
SHARDED = SHARDED_FP32.model_copy(update={"precision": Precision.BF16})
LEAVES = "its losses leave the baseline's: "
LITTLE, FLAT, NORM = {"reference": falling(0.05)}, {"reference": falling(0.0)}, {"batch_coupled": "batch norm"}
VERDICTS = {
    "exact: learns 4/5": (falling(0.4), RESPLIT, {}, LEAVES),
    "exact: learns 5/4": (falling(0.625), RESPLIT, {}, LEAVES),
    "exact: learns twice as much": (falling(1.0), RESPLIT, {}, LEAVES),
    "exact: a fiftieth of what was learnt apart": (falling(0.51), RESPLIT, {}, None),
    "as far apart as another seed": (falling(off=0.06), RESPLIT, {"again": falling(off=0.03)}, None),
    "further apart than another seed": (falling(off=0.06), RESPLIT, {}, LEAVES),
    "a loss in 16 bits off by their last": (falling(0.05, off=0.008), SHARDED, LITTLE, None),
    "a loss in 32 bits off as much": (falling(0.05, off=0.008), ROUNDED, LITTLE, LEAVES),
    "a sharded loss in 32 bits off as much": (falling(0.05, off=0.008), SHARDED_FP32, LITTLE, LEAVES),
    "nothing learnt, rounding": (falling(0.0, off=1e-5), RESPLIT, FLAT, None),
    "nothing learnt, a difference": (falling(0.0, off=1e-3), RESPLIT, FLAT, LEAVES),
    "nothing learnt, rounding to 16 bits": (falling(0.0, off=1e-3), ROUNDED, FLAT, None),
    "another optimizer, faster": (falling(0.9), OTHER_OPTIMIZER, {}, None),
    "another optimizer, slower": (falling(0.3), OTHER_OPTIMIZER, {}, None),
    "another optimizer, far less": (falling(0.1), OTHER_OPTIMIZER, {}, "it learns too little"),
    "another optimizer from another loss": (falling(start=24.0, by=4.0), OTHER_OPTIMIZER, {},
                                            "its first loss is 24, the baseline's from the same weights 6"),
    "another split with batch norm, slower": (falling(0.3), RESPLIT, NORM, None),
    "bf16 with batch norm, slower": (falling(0.3), ROUNDED, NORM, LEAVES),
    "fp16, whose scaler skips steps, slower": (falling(0.3), make_config(precision="fp16"), {}, None),
    "bf16 weights that learn": (falling(0.05, start=7.0), make_config(precision="pure_bf16"), {}, None),
    "another method that learns": (falling(0.05, start=7.0), OTHER_METHOD, {}, None),
    "another method whose loss rises": (falling(-0.2), OTHER_METHOD, {}, "its loss rises"),
}  # fmt: skip


@pytest.mark.parametrize(("curve", "config", "beside", "fault"), VERDICTS.values(), ids=VERDICTS)
def test_losses_are_held_to_the_criterion_of_the_change(curve, config, beside, fault):
    verdict = judged(curve, config, **beside)
    assert verdict.passed == (fault is None)
    assert verdict.statement.startswith(fault or ("losses follow", "losses are"))
    assert config is not OTHER_METHOD or fault or "10% of what the baseline learnt" in verdict.statement


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_never_passes(value):
    broken = falling().model_copy(update={"losses": (*falling().losses[:-1], value)})
    for config in (RESPLIT, OTHER_OPTIMIZER, OTHER_METHOD):
        verdict = judged(broken, config)
        assert not verdict.passed
        assert verdict.statement.startswith("its loss is not a number")


@pytest.mark.parametrize(("spread", "passes"), [(0.0, False), (0.001, False), (0.01, True), (0.03, True), (0.1, False)])
def test_dropout_must_move_the_loss_as_far_as_the_baselines(spread, passes):
    reference = falling().model_copy(update={"dropout_spread": 0.01})
    assert judged(falling().model_copy(update={"dropout_spread": spread}), reference=reference).passed is passes


# Real training: a tiny T5, whose head swallows the count of labels that a plain Trainer hands it, with dropout.

GLOBAL_BATCH, STEPS = 8, 15
TASK = LossTask(steps=STEPS, pass_steps=STEPS // 5, seed=7)
FIGURES = {**T5, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}


def trained(directory, *, micro_batch=4, task=TASK, dropout=0.1, normalized=True, lora=False, **arguments) -> LossCurve:
    """The losses of a real Trainer, as a loss run collects them."""
    torch.manual_seed(3)
    model = T5ForConditionalGeneration(T5Config(**FIGURES, dropout_rate=dropout))
    if normalized:
        normalize_loss(model)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    workload = make_workload(task=Task.SEQ2SEQ_LM, sequence_length=8, target_length=8, global_batch_size=GLOBAL_BATCH)
    samples, collator = training_data(workload, model.config, samples=TASK.pass_steps * GLOBAL_BATCH, directory=None)
    args = quiet_arguments(
        directory / "out", per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=GLOBAL_BATCH // micro_batch, train_sampling_strategy="sequential",
        remove_unused_columns=False, **{**arguments_of(task), **arguments},
    )  # fmt: skip
    rows = repeated(samples, STEPS * GLOBAL_BATCH)
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collator)
    with around_training(task, trainer, Reading()):
        trainer.train()
    return findings(task, trainer, Reading(), None)["curve"]


@pytest.fixture(scope="module")
def baselines(tmp_path_factory):
    directory = tmp_path_factory.mktemp("baselines")
    return trained(directory), trained(directory, task=TASK.model_copy(update={"seed": 8}))


@pytest.fixture
def verdict(baselines, tmp_path):
    """Return a function that trains a candidate and holds it against the baseline."""

    def hold(config=RESPLIT, **how):
        facts = make_facts(has_dropout=True)
        changed = changes(config, make_problem(baseline=BASE, facts=facts))
        return compare(*baselines, trained(tmp_path, **how), changed, facts, TASK.pass_steps)

    return hold


def test_without_dropout_two_seeds_train_the_same_and_dropout_is_seen_all_the_same(baselines):
    one, two = baselines
    assert one.losses == two.losses
    assert len(one.losses) == STEPS
    assert one.dropout_spread > 1e-3
    assert one.dropout_spread == pytest.approx(two.dropout_spread, rel=0.8)


@pytest.mark.parametrize(
    ("honest", "most"),
    [
        ({"micro_batch": 2}, 0.001),
        ({"micro_batch": 8, **installed_arguments("full")}, 0.001),
        ({"optim": "adamw_torch"}, 0.001),
        ({"config": ROUNDED, "bf16": True}, 0.05),
        ({"config": OTHER_OPTIMIZER, "optim": "adafactor"}, math.inf),
    ],
    ids=["smaller", "larger, checkpointed", "not fused", "bf16", "another optimizer"],
)
def test_an_honest_change_passes_by_a_wide_margin(verdict, honest, most):
    found = verdict(**honest)
    assert found.passed, found.statement
    if most < math.inf:
        apart = re.search(r"follow the baseline's: (?:less than )?([\d.]+)% of what was learnt apart", found.statement)
        assert float(apart[1]) < 100 * most


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"micro_batch": 2, "normalized": False}, "its losses leave the baseline's"),  # summed over the accumulation
        ({"learning_rate": 2.5e-5}, ""),
        ({"learning_rate": 7.5e-5}, ""),
        ({"dropout": 0.0}, "dropout moves its loss by 0 where"),
        ({"config": make_config(optim="sgd"), "optim": "sgd"}, ""),  # which learns next to nothing
    ],
    ids=["summed", "slower", "faster", "no dropout", "another optimizer"],
)
def test_another_training_is_refused(verdict, planted, said):
    found = verdict(**planted)
    assert not found.passed
    assert found.statement.startswith(said)


def test_an_adapter_is_sound(verdict):
    found = verdict(OTHER_METHOD, lora=True)
    assert found.passed, found.statement
    assert "not held to the baseline's curve" in found.statement
