"""The cost model of a search: traced by a child, read again by a resumed search, with what earlier ones learned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from factories import (
    CRASHED,
    Clock,
    make_budget,
    make_config,
    make_facts,
    make_gpu,
    make_hardware,
    make_plan,
    make_result,
    make_space_file,
)
from profiles import make_family, make_group, make_model, make_profile, make_storages, make_work

from autotune.cost.rates import OperatorRequest
from autotune.cost.time import CLIPPING, parameter_key
from autotune.errors import NothingFitsError
from autotune.estimates.fitting import ANSWER_FILE, FitRequest
from autotune.estimates.forecast import TRACING, TraceRequest, Traces
from autotune.execution.noise import HostWatch
from autotune.search import cost_model as module
from autotune.search.candidates import Candidates
from autotune.search.cost_model import check_fits, cost_model, learn, measured_model, program_tracer
from autotune.storage.home import read_observations, read_timings, write_trace
from autotune.units import GIB
from autotune.value import read_value, write_value
from autotune.values.conditions import Conditions
from autotune.values.config import Parallelism
from autotune.values.estimate import Timings

pytestmark = pytest.mark.usefixtures("own_home")
SPACE = make_space_file({"precision": ["bf16", "fp32"], "per_device_train_batch_size": "lattice"})
FP32, BF16 = make_family(), make_family(autocast="bfloat16")


@pytest.fixture(autouse=True)
def others(monkeypatch):
    """Return a function that sets the share of the machine that other processes take."""

    def take(share: float | None) -> None:
        monkeypatch.setattr(HostWatch, "conditions", lambda watch: Conditions(others_share=share))

    take(0.01)
    return take


class Asker:
    """Answers as a child would, in the search's directory; None for a child that dies."""

    def __init__(
        self, directory: Path, answer: Traces | str | None, timings: Timings | None = None, fitting: str | None = None
    ) -> None:
        self._directory = directory
        self._answers = {TraceRequest: answer, OperatorRequest: timings, FitRequest: fitting}
        self.asked: list[tuple[str, str, TraceRequest, float]] = []
        self.measured: list[OperatorRequest] = []

    def ask(
        self, name: str, entry: str, request: TraceRequest | OperatorRequest | FitRequest, *, timeout_s: float
    ) -> Path:
        directory, answer = self._directory / name, self._answers[type(request)]
        directory.mkdir(exist_ok=True)
        if isinstance(request, OperatorRequest):
            self.measured.append(request)
        elif isinstance(request, TraceRequest):
            self.asked.append((name, entry, request, timeout_s))
        if isinstance(answer, str):
            (directory / (ANSWER_FILE if isinstance(request, FitRequest) else "answer.json")).write_text(answer)
        elif answer is not None:
            write_value(answer, directory / "answer.json")
        for profile in answer.profiles if isinstance(answer, Traces) else ():
            write_trace(request.workload, request.parameters, profile)
        return directory

    @property
    def request(self) -> TraceRequest:
        ((_, _, request, _),) = self.asked
        return request


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def predict(tmp_path, notes):
    """Return a function that makes the cost model of a plan from what a child answers."""

    def make(answer: Traces | str | None = Traces(profiles=(make_profile(FP32),)), **plan):  # noqa: B008
        made = make_plan(**{"space": SPACE, **plan})
        asker = Asker(tmp_path, answer)
        model = cost_model(made, asker, tmp_path, lambda event: notes.append(event.text))
        return model, asker

    return make


def test_what_inductor_makes_of_a_family_is_asked_of_a_child_once_within_a_tenth_of_the_time(tmp_path, monkeypatch):
    clock, told = Clock(), []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    compiled, further, late = (
        make_family(device="cuda", checkpointing=kind, compiled=True) for kind in ("none", "full", "every-2nd")
    )

    class Slow(Asker):
        def ask(self, *given, **limits):
            clock.now_s += 20
            return super().ask(*given, **limits)

    plan = make_plan(hardware=make_gpu(), budget=make_budget(max_time_s=300.0))
    asker = Slow(tmp_path, Traces(profiles=(make_profile(compiled),)))
    trace = program_tracer(plan, asker, told.append, lambda: 50.0)
    assert [trace(compiled), trace(compiled)] == [make_profile(compiled)] * 2
    ((name, entry, request, timeout_s),) = asker.asked
    assert (name, entry, request.families, timeout_s) == ("programs", TRACING, (compiled,), 50.0)
    asker._answers[TraceRequest] = Traces(profiles=(), failures=("no device",))
    assert [trace(further), trace(further)] == [None, None]
    assert told[-1].text.endswith("by a rule of thumb: no device")
    assert trace(late) is None
    assert len(asker.asked) == 2  # 40 s of 30 are over
    assert trace(compiled) == make_profile(compiled)


def test_a_search_begins_with_models_as_written_and_with_programs_that_are_known(predict):
    space = make_space_file({"torch_compile_backend": [None, "inductor"]})
    written = make_family(device="cuda")
    compiled = written.model_copy(update={"compiled": True})
    plan = {"space": space, "hardware": make_gpu(name="NVIDIA A100-SXM4-80GB")}
    made = make_plan(**plan)
    write_trace(made.workload, made.facts.parameters, make_profile(compiled))
    model, asker = predict(Traces(profiles=(make_profile(written),)), **plan)
    assert asker.request.families == (written,)
    assert set(model.profiles) == {written, compiled}


@pytest.mark.parametrize(("left_s", "at_most_s"), [(40.0, 10.0), (-5.0, 1.0)])
def test_tracing_leaves_most_of_a_short_time_to_the_trials(tmp_path, left_s, at_most_s):
    asker = Asker(tmp_path, None)
    cost_model(make_plan(space=SPACE), asker, tmp_path, lambda event: None, left_s=left_s)
    ((*_, timeout_s),) = asker.asked
    assert timeout_s == at_most_s


def test_the_child_is_told_which_families_to_trace_the_baselines_first_and_for_how_long(predict):
    _, asker = predict(baseline=make_config(precision="fp32"), budget=make_budget(max_time_s=300.0))
    ((name, entry, request, timeout_s),) = asker.asked
    assert (name, entry) == ("trace", TRACING)
    assert request.families == (FP32, BF16)
    assert request.parameters == make_plan().facts.parameters
    assert request.workload == make_plan().workload
    assert request.limit_s < min(timeout_s, 0.1 * 300)


def test_what_this_search_or_an_earlier_one_traced_is_not_traced_again(predict, tmp_path):
    made = make_plan(space=SPACE)
    write_trace(made.workload, made.facts.parameters, make_profile(BF16))
    model, asker = predict()
    assert asker.request.families == (FP32,)
    assert set(model.profiles) == {FP32, BF16}
    (again := tmp_path / "again").mkdir()
    for folder in (tmp_path, again):  # resumed; anew
        nobody = Asker(folder, None)
        assert cost_model(made, nobody, folder, print).profiles == model.profiles
        assert nobody.asked == []
    assert read_value(Traces, again / "trace" / "answer.json").profiles == (make_profile(FP32), make_profile(BF16))


@pytest.mark.parametrize("answer", [None, "{"])
def test_a_child_that_dies_leaves_the_search_without_a_model(predict, notes, answer):
    model, _ = predict(answer)
    assert model is None
    assert notes[0].startswith("no prediction: tracing the model took more than ")


def test_kinds_of_configurations_that_there_was_no_time_to_trace_are_told_with_the_reason(predict, notes):
    predict(Traces(profiles=(make_profile(FP32),), left=3))
    told = "no prediction for 3 kinds of configurations: tracing takes too long; they are tried all the same"
    assert notes == [told]


@pytest.mark.parametrize(
    ("left", "traced", "said"),
    [
        (lambda folder: write_value(make_profile(FP32), folder / "profile-000.json"), True,
         " for some configurations: tracing the"),
        (lambda folder: (folder / "log.txt").write_text("MemoryError"), False, ": tracing failed: see trace/log.txt"),
    ],
    ids=["a trace", "its log"],
)  # fmt: skip
def test_what_a_child_had_traced_when_it_died_is_used_and_its_log_is_named(notes, tmp_path, left, traced, said):
    class Dies(Asker):
        def ask(self, *args, **kwargs) -> Path:
            directory = super().ask(*args, **kwargs)
            left(directory)
            return directory

    model = cost_model(make_plan(space=SPACE), Dies(tmp_path, None), tmp_path, lambda e: notes.append(e.text))
    assert (model is not None and set(model.profiles) == {FP32}) == traced
    assert len(notes) == 1
    assert notes[0].startswith(f"no prediction{said}")


def test_a_gpu_that_the_table_lacks_is_predicted_by_the_nearest_and_told(predict, notes):
    traced = Traces(profiles=(make_profile(make_family(device="cuda")),))
    model, _ = predict(traced, hardware=make_gpu(name="NVIDIA A10"))
    assert (bool(model.rates.peak_flops), notes) == (True, [])
    model, _ = predict(traced, hardware=make_gpu(name="NVIDIA of next year"))
    assert not model.rates.peak_flops
    assert notes[-1].startswith("times are predicted by the data sheet of ")


def test_what_a_search_learned_of_its_predictions_the_next_one_knows(predict, tmp_path):
    model, _ = predict()
    learn(make_plan(), model, [make_result(make_config(precision="bf16"))])  # which has no prediction
    assert read_observations(model.hardware, "llama") == ()
    slow = make_result(outcome=model.estimate(make_config()).samples_per_second / 2)
    learn(make_plan(), model, [slow, make_result(make_config(4), CRASHED)])
    assert read_observations(model.hardware, "llama") == (model.observation(slow),)
    again = cost_model(make_plan(space=SPACE), Asker(tmp_path, None), tmp_path, print)
    step_s = [m.estimate(make_config()).step_time_s for m in (model, again)]
    assert step_s[1] == pytest.approx(2 * step_s[0], rel=0.2)


BY_ARITHMETIC = r"nothing fits, by arithmetic .* optimizer states alone take 74\.51 GiB; the budget is 8\.00 GiB"


@pytest.mark.parametrize(
    ("traced", "answer", "said"),
    [(True, "nothing fits: fp32 comes nearest", "fp32 comes nearest"), (True, None, BY_ARITHMETIC),
     (False, None, BY_ARITHMETIC)],
    ids=["by a child", "by a child that dies", "without a model"],
)  # fmt: skip
def test_a_search_in_which_nothing_can_fit_ends_before_the_first_trial(tmp_path, notes, traced, answer, said):
    # 5,000 million parameters: AdamW takes 74.5 GiB for them, and there is no other optimizer.
    plan = make_plan(space=SPACE, facts=make_facts(parameters=5 * 10**9), memory_bytes=8 * GIB)
    model = make_model([make_profile(FP32)]) if traced else None
    with pytest.raises(NothingFitsError, match=said):
        check_fits(plan, model, Asker(tmp_path, None, fitting=answer), notes.append)


def test_what_only_a_compiler_might_make_fit_is_not_searched(tmp_path, notes):
    space = make_space_file({"torch_compile_backend": [None, "inductor"]})
    model = make_model([make_profile(FP32, storages=make_storages((0, 2, 0, GIB)))])
    needed = int(model.predict([make_config()]).needed_bytes[0])
    check_fits(make_plan(space=space, memory_bytes=needed), model, Asker(tmp_path, None), notes.append)
    plan = make_plan(space=space, memory_bytes=int(0.8 * needed))
    assert Candidates(model, plan).refusal(make_config(torch_compile_backend="inductor")) is None
    with pytest.raises(NothingFitsError):
        check_fits(plan, model, Asker(tmp_path, None, fitting="nothing fits"), notes.append)


def test_the_lightest_configuration_takes_the_place_of_a_baseline_that_can_not_fit(tmp_path, notes):
    space = make_space_file({"optim": ["adamw_torch", "adafactor"], "per_device_train_batch_size": "lattice"})
    matrix = make_group(1000, 1000, count=2000)
    profile = make_profile(FP32, parameters=(matrix,))
    plan = make_plan(space=space, facts=make_facts(parameters=2 * 10**9), memory_bytes=20 * GIB)
    check_fits(plan, make_model([profile]), Asker(tmp_path, None), lambda event: notes.append(event.text))
    assert notes[0].startswith("the baseline is not run: weights, gradients and optimizer states alone take 29.80 GiB")
    assert "the lightest configuration predicted to fit, optim adafactor" in notes[1].replace("micro-batch 1, ", "")


def test_what_can_not_fit_by_arithmetic_is_not_traced(predict):
    space = make_space_file({"precision": ["fp32", "bf16", "pure_bf16"], "per_device_train_batch_size": "lattice"})
    _, asker = predict(space=space, facts=make_facts(parameters=10**9), memory_bytes=12 * GIB)
    kinds = [(f.dtype, f.autocast) for f in asker.request.families]
    assert kinds == [("float32", None), ("bfloat16", None)]  # the baseline's own, and that of 7.5 GiB


MEASURABLE = make_profile(FP32, work=(make_work(call="mm [<0:1>]"),))
TIMINGS = Timings(
    operators={f"mm [{size}]": 0.01 * size for size in (1, 4, 16, 64)},
    optimizers={parameter_key(what, make_group(1000, 1000)): 1e-3 for what in ("adamw_torch_fused", CLIPPING)},
    operator_s=0.0,
    micro_step_s=0.0,
)


def searched(directory, timings, **fields):
    directory.mkdir(exist_ok=True)
    asker = Asker(directory, Traces(profiles=(MEASURABLE,)), timings)
    plan = make_plan(space=SPACE)
    model = cost_model(plan, asker, directory, lambda event: None)
    assert not asker.measured  # before the machine is quiet
    return measured_model(plan, model, asker, **fields), asker


def test_operators_are_measured_once_and_decide_what_is_predicted(tmp_path):
    plan = make_plan(space=SPACE)
    first, asker = searched(tmp_path / "one", TIMINGS)
    (request,) = asker.measured
    assert set(request.calls) == {"mm [1]", "mm [4]", "mm [16]"}
    assert request.optimizers == ("adamw_torch_fused",)
    expected = plan.workload.global_batch_size * 0.01
    assert first.estimate(make_config(4, precision="fp32")).step_time_s == pytest.approx(expected, rel=0.05)
    assert read_timings(plan.hardware) == TIMINGS
    second, asker = searched(tmp_path / "two", None)
    assert (asker.measured, second.rates.timings) == ([], TIMINGS)


def test_what_was_measured_while_others_took_the_cores_is_not_kept_for_later_searches(tmp_path, others):
    others(0.5)
    model, _ = searched(tmp_path / "one", TIMINGS)
    assert (model.rates.timings, read_timings(make_plan().hardware)) == (TIMINGS, None)
    others(None)  # no counters to tell by
    _, asker = searched(tmp_path / "two", TIMINGS)
    assert len(asker.measured) == 1
    assert read_timings(make_plan().hardware) == TIMINGS


@pytest.mark.parametrize(("make", "asked"), [(make_hardware, 0), (make_gpu, 1)])
def test_operators_are_measured_for_several_gpus_but_not_for_processes_that_share_a_cpu(tmp_path, make, asked):
    profile = make_profile(make_family(device=make().kind), work=(make_work(call="mm [<0:1>]"),))
    asker, shared = Asker(tmp_path, None, TIMINGS), make_config(8, parallelism=Parallelism(world_size=2))
    plan = make_plan(space=SPACE, hardware=make(count=2), baseline=shared)
    measured_model(plan, make_model([profile]), asker)
    assert len(asker.measured) == asked


@pytest.mark.parametrize(("timings", "left_s", "asked"), [(None, 100.0, 1), (TIMINGS, -5.0, 0)])
def test_where_no_operator_can_be_measured_or_the_search_is_over_rates_alone_predict(tmp_path, timings, left_s, asked):
    model, asker = searched(tmp_path / "one", timings, left_s=left_s)
    assert len(asker.measured) == asked
    assert model.rates.timings is None
    assert model.estimate(make_config(precision="fp32")) is not None
