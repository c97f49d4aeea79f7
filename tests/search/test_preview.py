"""What a search would do: its knobs, what is refused and why, and its first trials."""

from factories import make_plan
from predicted_space import GB, SPACE, make_model_of

from autotune.search.preview import preview
from autotune.search.sampler import CostModelSampler
from autotune.values.knob import Allowance


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


def test_without_a_cost_model_the_baseline_alone_is_foreseen():
    plan = make_plan(space=SPACE)
    found = preview(plan, None)
    assert [trial.config for trial in found.first_trials] == [plan.baseline]
    assert found.first_trials[0].predicted is None
