"""Answers of searches that ran in no time, for tests of what is exported of them."""

from __future__ import annotations

import functools
from typing import Any

from factories import make_config, make_gpu, make_hardware, make_plan, make_result, make_spec, make_workload

from autotune.exports.targets import draft
from autotune.exports.winner import Draft
from autotune.training.arguments import plan as mapped
from autotune.tuning_result import TuningResult, with_methods
from autotune.values.config import Parallelism, TrainConfig
from autotune.values.model import Task
from autotune.values.result import Arguments
from autotune.values.trial import Purpose
from autotune.verification.finals import Finals
from autotune.verification.state import SearchState
from autotune.verification.verdict import assemble

GPU = make_gpu(cores=8)


def answer_of(config: TrainConfig, **plan: Any) -> TuningResult:
    """The answer in which `config` was faster than the baseline."""
    made, found = make_plan(**plan), _assembled()
    mapping = mapped(config, made.workload, made.hardware)
    own = mapping.model_dump(include={"model", "quantization", "adapter"})
    arguments = Arguments(training_arguments=mapping.tuned, **own)
    best = found.best.model_copy(update={"config": config})
    given = {"workload": made.workload, "hardware": made.hardware, "best": best, "arguments": arguments}
    return found.model_copy(update=given)


@functools.cache
def _assembled() -> TuningResult:
    """Any answer; its intervals take some tenths of a second."""
    made = make_plan()
    trials = [make_result(made.baseline, purpose=Purpose.BASELINE), make_result(make_config(4), 20.0, number=1)]
    found = assemble(Finals(SearchState(made, trials)), 1.0)
    assert found is not None
    return with_methods(found)


def answer_with(
    *,
    micro_batch: int = 4,
    name: str = "meta-llama/Llama-3.2-1B",
    task: Task = Task.CAUSAL_LM,
    own: dict[str, Any] | None = None,
    hardware: Any = GPU,
    **knobs: Any,
) -> TuningResult:
    """The answer of a search for a catalogue's model, on a GPU with everything, in which these knobs won."""
    spread = knobs.pop("parallelism", {})
    workload = make_workload(
        model=make_spec(name=name, kind=knobs.pop("kind", "decoder")), task=task, fixed_arguments=own or {}
    )
    parallel = Parallelism(**spread)
    return answer_of(
        make_config(micro_batch, parallelism=parallel, **knobs),
        workload=workload,
        hardware=hardware,
    )


def drafted(target: str, **answer: Any) -> Draft:
    return draft(answer_with(**answer), target)


CPU = make_hardware()
