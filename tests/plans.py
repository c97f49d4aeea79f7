"""Outlines and plans of searches, as `autotune find` makes them from options."""

from factories import make_facts

from autotune.planning.options import SearchOptions
from autotune.planning.plan import SearchPlan
from autotune.planning.planner import complete, outline
from autotune.planning.workload import Outline


def outlined(**options) -> Outline:
    return outline(SearchOptions(**{"model": "gpt2", "device": "cpu", **options}))


def planned(facts=None, **options) -> SearchPlan:
    found = outlined(**options)
    return complete(found, facts or make_facts(task=found.workload.task))
