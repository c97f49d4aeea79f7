"""The studies that optuna-dashboard is given: names that its plots show, and nothing of the search changed."""

import optuna
import pytest
from factories import OUT_OF_MEMORY, make_config, make_measurement, make_result, make_space
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from autotune.integrations.dashboard import ShownStudy
from autotune.units import GIB
from autotune.values.objective import Objective
from autotune.values.trial import Memory, Prediction, Purpose

SPACE = make_space(
    {
        "precision": ["fp32", "bf16"],
        "per_device_train_batch_size": {"choices": "lattice"},
        "torch_compile_backend": [None, "inductor"],
        "adapter": [None, "lora"],
        "adapter.rank": {"choices": [8, 64], "when": {"adapter": ["lora"]}},
    }
)


@pytest.fixture
def shown() -> ShownStudy:
    return ShownStudy(
        "tiny", SPACE, objective=Objective(), words=lambda c: f"a batch of {c.optim}", about={"device": "a CPU"}
    )


def studies(shown: ShownStudy) -> list[optuna.Study]:
    names = optuna.get_all_study_names(shown.storage)
    return [optuna.load_study(study_name=name, storage=shown.storage) for name in names]


def test_there_is_a_study_of_speed_and_one_of_speed_and_memory(shown):
    speed, both = studies(shown)
    assert (speed.study_name, speed.metric_names) == ("tiny", ["samples/s"])
    assert (both.study_name, both.metric_names) == ("tiny: speed and memory", ["samples/s", "peak memory GiB"])
    assert [d.name for d in both.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert speed.user_attrs == both.user_attrs == {"device": "a CPU"}


def test_a_trial_has_its_parameters_by_name_and_its_figures(shown):
    measured = make_measurement(30.0, memory=Memory(resident_bytes=3 * GIB), tokens_per_second=3840.0)
    prediction = Prediction(samples_per_second=33.0, peak_bytes=2 * GIB)
    shown.add([make_result(make_config(16, precision="bf16"), measured, number=4, prediction=prediction)])
    speed, both = studies(shown)
    (trial,) = speed.trials
    assert trial.params == {
        "precision": "bf16",
        "per_device_train_batch_size": 16,
        "torch_compile_backend": None,
        "adapter": None,
    }
    assert trial.value == pytest.approx(30.0)
    assert trial.user_attrs == {
        "trial": 4,
        "purpose": "search",
        "status": "completed",
        "configuration": "a batch of adamw_torch_fused",
        "peak memory GiB": 3.0,
        "tokens/s": 3840.0,
        "predicted samples/s": 33.0,
        "predicted peak GiB": 2.0,
        "seconds": 10.0,
    }
    assert both.trials[0].values == pytest.approx([30.0, 3.0])


def test_numbers_are_drawn_on_a_scale_and_words_as_categories(shown):
    shown.add([make_result(SPACE.config({"adapter": "lora", "adapter.rank": 64}))])
    (trial,) = studies(shown)[0].trials
    assert trial.distributions["per_device_train_batch_size"] == IntDistribution(1, 16, log=True)
    assert trial.distributions["adapter.rank"] == IntDistribution(8, 64, log=True)
    assert trial.distributions["precision"] == CategoricalDistribution(["fp32", "bf16"])


def test_a_trial_that_ran_out_of_memory_says_why(shown):
    shown.add([make_result(make_config(16), OUT_OF_MEMORY)])
    speed, both = (study.trials[0] for study in studies(shown))
    assert (speed.state, both.state) == (TrialState.PRUNED, TrialState.FAIL)
    assert speed.user_attrs["status"] == "out of memory"
    assert speed.user_attrs["cause"] == "no memory left"


def test_finals_are_shown_and_checks_are_not(shown):
    purposes = (Purpose.BASELINE, Purpose.FINAL, Purpose.SOAK, Purpose.LOSS_CHECK)
    shown.add([make_result(purpose=purpose, number=number) for number, purpose in enumerate(purposes)])
    assert [t.user_attrs["purpose"] for t in studies(shown)[0].trials] == ["baseline", "final"]


def test_trials_are_added_once(shown):
    first, second = make_result(number=0), make_result(make_config(4), 12.0, number=1)
    shown.add([first])
    shown.add([first, second])
    assert [t.user_attrs["trial"] for t in studies(shown)[0].trials] == [0, 1]


def test_a_trial_has_the_time_at_which_it_ran(shown):
    shown.add([make_result().model_copy(update={"began": 1_790_000_000.0})])
    (trial,) = studies(shown)[0].trials
    assert trial.datetime_start.timestamp() == 1_790_000_000.0
    assert trial.duration.total_seconds() == pytest.approx(10.0)
