"""What a search would do: its knobs, what is refused and why, and its first trials."""

import pytest
from factories import make_config, make_facts, make_gpu, make_hardware, make_plan, make_space_file, make_workload
from predicted_space import GB, SPACE, make_model_of
from profiles import make_model, make_profile

from autotune.cost.family import family_of
from autotune.search.candidates import Candidates
from autotune.search.run import preview
from autotune.search.sampler import CostModelSampler
from autotune.space.file import load_space
from autotune.values.config import Allowance


def test_what_may_be_tried_is_counted_with_its_knobs():
    found = preview(make_plan(space=SPACE, memory_bytes=100 * GB), make_model_of())
    assert found.knobs == {
        "precision": ("fp32", "bf16"),
        "checkpointing": ("none", "full"),
        "micro-batch": ("1", "2", "4", "8", "16"),
    }
    assert (found.configurations, found.refused) == (20, {})


def test_the_first_trials_are_those_of_the_search_with_their_predictions():
    plan, model = make_plan(space=SPACE, memory_bytes=100 * GB), make_model_of()
    first, second, *others = preview(plan, model).first_trials
    assert (first.config, first.changes) == (plan.baseline, ())
    assert second.config.precision == "bf16"
    assert second.predicted == CostModelSampler(plan, model).prediction(second.config)
    assert second.predicted.samples_per_second > first.predicted.samples_per_second
    assert len({trial.config for trial in (first, second, *others)}) == len(others) + 2


def test_what_is_refused_is_grouped_by_reason():
    plan = make_plan(space=SPACE, memory_bytes=3 * GB, allowance=Allowance.EXACT)
    found = preview(plan, make_model_of())
    assert found.knobs.keys() == {"checkpointing", "micro-batch"}
    ((reason, values),) = found.values_refused.items()
    assert values == ("precision bf16",)
    assert "--allow exact does not admit" in reason
    assert found.refused == {"predicted to need more than the budget of 2.79 GiB": 10 - found.configurations}
    assert 0 < found.configurations < 10


def everything_known(plan):
    """A cost model that has traced all families of a plan."""
    families = dict.fromkeys(family_of(config, plan.hardware) for config in plan.search_space.legal)
    profiles = [make_profile(family) for family in families]
    return make_model(profiles, workload=plan.workload, hardware=plan.hardware)


MODELS = {
    "plain": make_facts(),
    "experts": make_facts(experts=8, experts_implementations=("grouped_mm", "batched_mm", "eager")),
    "without attention or checkpointing": make_facts(attn_implementations=(), supports_checkpointing=False),
    "a head whose loss is chunked": make_facts(chunks_loss=True, layers=24),
    "without linear layers": make_facts(linear_modules=(), has_dropout=True, batch_coupled="batch norm"),
}
DEVICES = [make_hardware(), make_gpu(), make_gpu(capability=(7, 0))]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"{device.kind} {device.capability}")
@pytest.mark.parametrize("facts", MODELS.values(), ids=MODELS)
def test_every_legal_point_is_ranked_and_counted(facts, device):
    made = {"space": load_space("default"), "facts": facts, "hardware": device, "memory_bytes": 10**15}
    plan = make_plan(**made, workload=make_workload(global_batch_size=2), baseline=make_config(1))
    model, space = everything_known(plan), plan.search_space
    legal = sum(1 for _ in space.points())
    ranked = Candidates(model, plan, space)
    assert len(ranked.ranked) * len(space.loadings) == legal
    assert ranked.knows_all
    assert preview(plan, model).configurations == legal + (space.refusal(plan.baseline) is not None)


def test_the_last_of_many_thousand_points_is_ranked_first_if_it_alone_fits():
    space = make_space_file(
        {
            "precision": ["fp32", "bf16", "pure_bf16"],
            "optim": ["adamw_torch_fused", "adamw_torch", "adafactor"],
            "per_device_train_batch_size": "lattice",
            "checkpointing": ["none", "full"],
            "adapter": [None, "lora"],
            "adapter.rank": {"choices": [4, 8, 16, 32, 64], "when": {"adapter": ["lora"]}},
            "dataloader_num_workers": list(range(64)),
            "dataloader_pin_memory": [False, True],
        }
    )
    facts, memory = make_facts(parameters=7 * 10**9), 18 * 2**30
    plan = make_plan(space=space, facts=facts, hardware=make_gpu(), memory_bytes=memory)
    model = everything_known(plan)
    found = preview(plan, model)
    assert sum(found.refused.values()) + found.configurations == 3 * 3 * 5 * 2 * 6 * 128
    _, *others = found.first_trials
    assert others
    for trial in others:
        assert (trial.config.precision, trial.config.adapter.kind) == ("pure_bf16", "lora")
        assert trial.predicted.samples_per_second > 0
