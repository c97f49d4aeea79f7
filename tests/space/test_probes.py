"""Two shallow probes and the line through them: what is inferred, when candidates are probed, what a search does."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from factories import (
    OUT_OF_MEMORY,
    Clock,
    ScriptedRunner,
    make_budget,
    make_config,
    make_facts,
    make_limits,
    make_measurement,
    make_plan,
    make_result,
    make_space_file,
    make_workload,
)
from profiles import MB, make_family, make_model, make_profile, make_rates, make_work

from autotune.cost.model import CostModel
from autotune.errors import InputError
from autotune.search.tuner import SearchInterrupted, Tuner
from autotune.space.history import History
from autotune.space.probes import Probes, inferred, planned, shortened
from autotune.storage.run_directory import RunDirectory
from autotune.values.config import TrainConfig
from autotune.values.model import ProbeDepths
from autotune.values.trial import Memory, Outcome, Prediction, Purpose, TrialRequest, TrialResult

GIB = 1 << 30
FIELD = "num_hidden_layers"
DEPTHS = ProbeDepths(low={FIELD: 1}, high={FIELD: 5}, full={FIELD: 24})
WORKLOAD = make_workload()
SAMPLES = 16


def step_s(layers: int) -> float:
    return 0.5 + 0.25 * layers


def probe(depths: dict[str, int], config: TrainConfig | None = None, outcome: Outcome | None = None) -> TrialResult:
    """Time and memory that are lines in the depth."""
    layers = depths[FIELD]
    measured = make_measurement(SAMPLES / step_s(layers), memory=Memory(resident_bytes=(2 + layers) * GIB))
    return make_result(config, outcome or measured, purpose=Purpose.PROBE, depths=depths)


def whole(config: TrainConfig | None = None, **fields) -> TrialResult:
    measured = make_measurement(SAMPLES / step_s(24), memory=Memory(resident_bytes=26 * GIB))
    return make_result(config, measured, **{"duration_s": 60.0, **fields})


def probes_of(*results: TrialResult, depths: ProbeDepths | None = DEPTHS) -> Probes:
    history = History()
    for result in results:
        if result.request.purpose.explores:
            history.add(result)
    return Probes(depths, WORKLOAD, history, results)


OTHER = make_config(4)


def test_what_is_a_line_in_depth_is_inferred_exactly():
    found = inferred(probe(DEPTHS.low), probe(DEPTHS.high), DEPTHS, SAMPLES)
    assert SAMPLES / found.measurement.samples_per_second == pytest.approx(step_s(24))
    assert found.measurement.memory == Memory(resident_bytes=26 * GIB)
    assert found.request.depths == {}


def test_a_peak_that_is_of_another_moment_is_not_inferred():
    """With few layers the loss is the peak, with all of them the optimizer's step: the line is too low."""
    high = probe(DEPTHS.high)

    def memory(expected_bytes: int) -> Memory:
        prediction = Prediction(samples_per_second=1.0, peak_bytes=expected_bytes)
        asked = high.model_copy(update={"request": high.request.model_copy(update={"prediction": prediction})})
        return inferred(probe(DEPTHS.low), asked, DEPTHS, SAMPLES).measurement.memory

    assert memory(27 * GIB) == Memory(resident_bytes=26 * GIB)
    assert memory(28 * GIB) == Memory()


def test_the_interval_carries_the_noise_of_both_probes():
    """Of four steps 1 % apart, carried on by 4.75 times the distance of the probes."""
    exact = make_measurement(SAMPLES / step_s(1), spread=0.0)
    found = inferred(probe(DEPTHS.low), probe(DEPTHS.high), DEPTHS, SAMPLES).measurement
    quieter = inferred(probe(DEPTHS.low, outcome=exact), probe(DEPTHS.high), DEPTHS, SAMPLES).measurement
    low, high = found.samples_per_second_interval.low, found.samples_per_second_interval.high
    half = 3.182 * math.sqrt(5 / 3) * 0.01 / 2  # Student's at 95 %, of the spread of make_measurement
    wanted = half * math.hypot(4.75 * step_s(1), 5.75 * step_s(5))
    assert SAMPLES / low - step_s(24) == pytest.approx(wanted, rel=1e-3)
    assert step_s(24) - SAMPLES / high == pytest.approx(wanted, rel=1e-3)
    assert low < quieter.samples_per_second_interval.low


@pytest.mark.parametrize("outcome", [OUT_OF_MEMORY, make_measurement(SAMPLES / step_s(5))])
def test_nothing_is_inferred_from_a_failure_or_noise_alone(outcome):
    """A shallow model that takes as long as the deeper one says nothing but that something disturbed it."""
    assert inferred(probe(DEPTHS.low, outcome=outcome), probe(DEPTHS.high), DEPTHS, SAMPLES) is None


def test_a_candidate_is_probed_at_the_lower_depth_and_then_at_the_higher_one():
    known = whole()
    assert probes_of(known).next(OTHER) == DEPTHS.low
    low = probe(DEPTHS.low, OTHER)
    assert probes_of(known, low).next(OTHER) == DEPTHS.high
    assert probes_of(known, low, probe(DEPTHS.high, OTHER)).next(OTHER) is None


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ([], "nothing says how long a trial takes"),
        ([whole(duration_s=2.5)], "a start of 1 s twice is more than half of it"),
        ([whole(), probe(DEPTHS.low, OTHER, OUT_OF_MEMORY)], "a probe failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_probes_do_not_pay_the_candidate_runs_at_once(known, why):
    assert probes_of(*known).next(OTHER) is None, why


@pytest.mark.parametrize("fields", [{"checkpointing": "every-2nd"}, {"torch_compile_backend": "inductor"}], ids=str)
def test_what_layers_do_not_do_alike_or_what_is_compiled_is_not_probed(fields):
    assert probes_of(whole()).next(make_config(**fields)) is None


def test_without_depths_nothing_is_probed():
    assert probes_of(whole(), depths=None).next(OTHER) is None


def test_the_cost_model_learns_from_full_depth_and_from_the_second_probe():
    known, low, high = whole(), probe(DEPTHS.low, OTHER), probe(DEPTHS.high, OTHER)
    assert probes_of(known).lesson(known) is known
    assert probes_of(known, low).lesson(low) is None
    lesson = probes_of(known, low, high).lesson(high)
    assert lesson.measurement.samples_per_second == pytest.approx(SAMPLES / step_s(24))
    assert probes_of(known).lesson(make_result(purpose=Purpose.SOAK)) is None


def test_the_error_is_told_where_the_full_depth_ran_too():
    results = [whole(), probe(DEPTHS.low, OTHER), probe(DEPTHS.high, OTHER)]
    line = probes_of(*results).summary()
    assert line == "shallow probes: 1 configuration was inferred from 1 and 5 of 24 layers"
    slower = make_measurement(SAMPLES / step_s(24) / 1.25, memory=Memory(resident_bytes=20 * GIB))
    line = probes_of(*results, make_result(OTHER, slower)).summary()
    wanted = "of 1 that also ran at full depth the step time was off by up to -20.0%, the peak memory of 1 by +30.0%"
    assert line.endswith(wanted)
    assert probes_of(whole()).summary() is None


def test_a_probe_takes_the_time_that_its_depth_does():
    given = make_limits(discarded_s=2.0, measure_time_s=24.0)
    assert shortened(given, DEPTHS.share(DEPTHS.high)).measure_time_s == pytest.approx(5.0)
    assert shortened(given, DEPTHS.share(DEPTHS.low)).measure_time_s == pytest.approx(3.0)  # an eighth at the least
    assert shortened(given, 1.0) == given


@pytest.mark.parametrize(
    ("asked", "probes", "wanted"), [(True, DEPTHS, DEPTHS), (False, DEPTHS, None), (None, DEPTHS, None)]
)
def test_probes_are_run_where_they_are_asked_for(asked, probes, wanted):
    assert planned(asked, make_facts(probes=probes), "cpu", exhaustive=False) == wanted


def test_the_default_is_the_devices(monkeypatch):
    monkeypatch.setattr("autotune.space.probes.BY_DEFAULT", {"cuda": True})
    facts = make_facts(probes=DEPTHS)
    assert planned(None, facts, "cuda", exhaustive=False) == DEPTHS
    assert planned(None, facts, "cuda", exhaustive=True) is None
    assert planned(None, make_facts(not_probed="no layers"), "cuda", exhaustive=False) is None


@pytest.mark.parametrize(
    ("facts", "exhaustive", "message"),
    [
        ({"not_probed": "its layers differ in size"}, False, "--shallow: its layers differ in size; leave it out"),
        ({"probes": DEPTHS}, True, "--shallow: --exhaustive measures every point at full depth; leave one of"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(facts, exhaustive, message):
    with pytest.raises(InputError, match=message):
        planned(True, make_facts(**facts), "cpu", exhaustive=exhaustive)


# -- a search ---------------------------------------------------------------------------------------------------------

BASE = make_config(8)
SPACE = make_space_file(
    {
        "precision": ["fp32", "bf16"],
        "checkpointing": ["none", "full"],
        "per_device_train_batch_size": {"choices": [4, 8, 16]},
    }
)
# The roofline takes bf16 for four times as fast and checkpointing for twice as slow. Really bf16 is slow here.
REAL = {("fp32", "none"): 1.0, ("bf16", "none"): 0.3, ("fp32", "full"): 0.7, ("bf16", "full"): 0.2}


def model() -> CostModel:
    profiles = [
        make_profile(
            make_family(autocast="bfloat16" if precision == "bf16" else None, checkpointing=checkpointing),
            work=(make_work((10 if checkpointing == "none" else 20) * MB, half=precision == "bf16"),),
        )
        for precision, checkpointing in REAL
    ]
    return make_model(profiles, rates=make_rates())


def outcome(request: TrialRequest) -> Outcome:
    layers = request.depths.get(FIELD, 24)
    factor = REAL[str(request.config.precision), request.config.checkpointing]
    return make_measurement(10 * factor * step_s(24) / step_s(layers), memory=Memory(resident_bytes=(2 + layers) * MB))


class Search:
    """A search of a plan with probes, in a run directory that can be gone on with."""

    def __init__(self, directory: Path, probes: ProbeDepths | None = DEPTHS) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.plan = make_plan(
            space=SPACE,
            baseline=BASE,
            probes=probes,
            budget=make_budget(final_rounds=1),
        )

    def run(self, stop_after: int | None = None):
        clock = Clock()
        count = iter(range(1000))

        def until(request: TrialRequest) -> Outcome:
            if next(count) == stop_after:
                raise KeyboardInterrupt
            return outcome(request)

        runner = ScriptedRunner(self.directory, until, duration_s=lambda r: 10 if r.depths else 60, clock=clock)
        ignored = RunDirectory(self.directory)
        return Tuner(self.plan, ignored, runner, lambda event: None, clock=clock, model=model()).run()

    @property
    def ran(self) -> list[TrialRequest]:
        return [r.request for r in RunDirectory(self.directory).results()]


def test_a_candidate_that_probes_show_to_be_slow_does_not_run_at_full_depth(tmp_path):
    promising = make_config(16, precision="bf16")  # by the roofline the best
    without, search = Search(tmp_path / "without", probes=None), Search(tmp_path / "with")
    without.run()
    assert without.ran[1].config == promising
    result = search.run()
    assert [(r.config, r.depths) for r in search.ran[1:3]] == [(promising, DEPTHS.low), (promising, DEPTHS.high)]
    assert promising not in [r.config for r in search.ran if not r.depths]
    assert (result.best.config.precision, result.best.config.checkpointing) == ("fp32", "none")
    assert all(r.purpose is Purpose.PROBE for r in search.ran if r.depths)


def test_what_is_inferred_is_never_shown_as_measured(tmp_path):
    result = Search(tmp_path).run()
    told = [trial for trial in result.trials if trial.purpose is Purpose.PROBE]
    assert told
    assert all((trial.samples_per_second, trial.peak_bytes) == (None, None) for trial in told)
    assert {trial.depths[FIELD] for trial in told} == {1, 5}
    assert result.probed.startswith("shallow probes: ")
    measured = [contender.config for contender in (result.best, result.baseline, *result.runners_up)]
    whole_trials = {trial.config for trial in result.trials if not trial.depths and trial.samples_per_second}
    assert set(measured) <= whole_trials


def test_a_search_stopped_between_probes_goes_on_with_the_other(tmp_path):
    whole_run, stopped = Search(tmp_path / "whole"), Search(tmp_path / "stopped")
    whole_run.run()
    with pytest.raises(SearchInterrupted):
        stopped.run(stop_after=2)
    assert [r.depths for r in stopped.ran] == [{}, DEPTHS.low]
    stopped.run()
    assert stopped.ran == whole_run.ran


def test_a_probes_limits_are_those_of_its_depth(tmp_path):
    search = Search(tmp_path)
    search.run()
    budget = search.plan.budget
    for request in search.ran:
        share = max(1 / 8, request.depths.get(FIELD, 24) / 24)
        if request.purpose in (Purpose.PROBE, Purpose.SEARCH):
            assert request.limits.measure_time_s == budget.measure_time_s * share
