"""What would make a model fit is answered in a file, from what the search has traced and what is traced for it."""

from plans import planned

from autotune.cost.family import family_of, shape_of
from autotune.cost.profiler import profile
from autotune.estimates import fitting
from autotune.estimates.fitting import FitAnswer, FitRequest, run_fitting
from autotune.storage.home import rates_of
from autotune.value import read_value, write_value
from autotune.values.config import Allowance


def test_the_answer_names_the_change_that_fits_though_the_search_may_not_make_it(wide_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "read_observations", lambda *_: ())  # those of other tests
    plan = planned(model=str(wide_llama), allow=Allowance.EXACT, memory="90MiB")
    traced = profile(plan.workload.model, family_of(plan.baseline, plan.hardware), shape_of(plan.workload))
    write_value(
        FitRequest(plan=plan, rates=rates_of(plan.hardware), profiles=(traced,), configs=tuple(plan.every_config())),
        tmp_path / "request.json",
    )
    run_fitting(tmp_path)
    text = read_value(FitAnswer, tmp_path / "answer.json").text
    assert text.startswith("nothing fits: ")
    assert " comes nearest and takes " in text
    assert "with --fix " in text
    assert "(--allow " in text
