"""A plan: its file, its space and its configurations."""

from plans import planned

from autotune.planning.plan import SearchPlan
from autotune.value import read_value, write_value
from autotune.values.budget import Effort
from autotune.values.knob import Allowance


def test_every_configuration_of_a_plan_is_legal_and_there_once_the_baseline_first():
    plan = planned(effort=Effort.QUICK)
    configs = plan.every_config()
    assert configs[0] == plan.baseline
    assert len(configs) == len(set(configs)) == plan.search_space().size()


def test_a_plan_survives_its_file(tmp_path):
    plan = planned(model="t5-small")
    write_value(plan, tmp_path / "search.json")
    assert read_value(SearchPlan, tmp_path / "search.json") == plan


def test_the_space_of_a_plan_is_bound_to_it():
    space = planned(allow=Allowance.EXACT).search_space()
    assert {space.config(point).precision for point in space.points()} == {"fp32"}
