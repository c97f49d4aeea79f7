"""Plans of searches, as `autotune find` makes them from options; nothing is looked at in a child process."""

from typing import NamedTuple

from factories import make_facts

from autotune.planning.options import SearchOptions
from autotune.planning.plan import SearchPlan
from autotune.planning.planner import Start, Subject, start_of
from autotune.values import hardware
from autotune.values.model import ModelFacts
from autotune.values.problem import Allotment
from autotune.values.trial import Description, ExamineRequest, Inquiry


class Looked(NamedTuple):
    """Stands for the child process that looks at a model or at code: it has found these facts."""

    facts: ModelFacts | None = None
    found: Description | None = None

    def __call__(self, request: Inquiry) -> Description:
        if isinstance(request, ExamineRequest):
            return Description(facts=request.facts)
        return self.found or Description(facts=self.facts or make_facts(task=request.workload.task))


def begun(options: SearchOptions) -> Start:
    """The beginning of a plan for the device of the options, as a search at a single place has it."""
    return start_of(options, Allotment(hardware=hardware.detect(options.device)))


def started(**options) -> Start:
    return begun(SearchOptions(**{"model": "gpt2", "device": "cpu", **options}))


def planned(facts=None, **options) -> SearchPlan:
    start = started(**options)
    return Subject(start.options, start.options.model).plan(start, Looked(facts))
