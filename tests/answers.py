"""Answers of searches of which a test names only what trials and finals measured."""

import io

from factories import make_budget, make_config, make_failure, make_measurement, make_plan, make_result

from autotune.output.terminal import Console
from autotune.planning.plan import SearchState
from autotune.space.knobs import changes
from autotune.tuning_result import TuningResult
from autotune.values.config import TrainConfig
from autotune.values.problem import Problem
from autotune.values.result import ResultData, RunReport
from autotune.values.time_spent import Spent
from autotune.values.trial import Outcome, Purpose, TrialStatus
from autotune.verification.finals import Finals
from autotune.verification.verdict import assemble

Trials = list[tuple[TrainConfig, Outcome | float]]

BASE = make_config()
BIG = make_config(16)
BF16 = make_config(16, precision="bf16")
ADAFACTOR = make_config(16, precision="bf16", optim="adafactor")
LORA = make_config(16, adapter={})
COMPILED = make_config(torch_compile_backend="inductor")

TIMED_OUT = make_failure(TrialStatus.TIMED_OUT, "cut short")


def noisy(rate: float) -> Outcome:
    return make_measurement(rate, spread=0.2)


def answer(searched: Trials, finals: Trials = (), **fields) -> TuningResult | None:
    """The answer of a search whose baseline is BASE if none is given; `finals` come in the order in which they ran."""
    plan = make_plan(**{"budget": make_budget(finalists=2), "baseline": BASE, **fields})
    results = []
    for number, (config, outcome) in enumerate(searched):
        purpose = Purpose.BASELINE if config == plan.baseline else Purpose.SEARCH
        results.append(make_result(config, outcome, number=number, purpose=purpose))
    for number, (config, outcome) in enumerate(finals, len(results)):
        results.append(make_result(config, outcome, number=number, purpose=Purpose.FINAL))
    state = SearchState(plan, results)
    state.refused[make_config(2)] = "hopeless"
    return assemble(Finals(state), 60.0)


def report_of(result: ResultData) -> RunReport:
    """The report of an answer, as `gather` makes it of a run directory."""
    fields = {name: getattr(result, name) for name in Problem.model_fields} | {"baseline": result.baseline.config}
    problem = Problem(**fields)
    trials = (row.model_copy(update={"changes": changes(row.config, problem)}) for row in result.trials)
    return RunReport(
        run_directory="", written="", autotune_version=result.autotune_version, is_running=False, command=None,
        **fields, result=result, trials=tuple(trials),
        spent=result.spent or Spent.of((), result.search_time_s, {}),
    )  # fmt: skip


def compiled(rate: float, start_s: float) -> Outcome:
    measured = make_measurement(rate)
    return measured.model_copy(update={"first_step_s": measured.step_times_s[0] + start_s})


def drawn(renderable, width: int = 160) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(renderable, highlight=False, crop=False)
    return file.getvalue()
