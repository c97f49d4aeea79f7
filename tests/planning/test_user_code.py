"""A user's own code: which Trainer, script or loop can be tuned, and what its plan is."""

import dataclasses
import itertools
import json
import shlex
import shutil
import threading
from pathlib import Path

import pytest
from factories import VERSIONS, make_facts, make_gpu, make_hardware, make_plan, make_spec, make_workload
from plans import Looked, begun

import autotune
from autotune.api import subject_of
from autotune.errors import InputError, LoopError
from autotune.output.gather import command
from autotune.planning.launchers import code_of
from autotune.planning.options import SearchOptions, options_of
from autotune.planning.user_code import UserLoop, UserTrainer, space_of
from autotune.space.knobs import changes, put_back, shown_changes
from autotune.storage.run_directory import RunDirectory
from autotune.values.config import Allowance, Parallelism, TrainConfig
from autotune.values.model import Task
from autotune.values.trial import Description, Purpose
from autotune.values.workload import STEP_FILE, LengthProfile, OwnCode, OwnFound, Workload

SCRIPT = ["python", "train.py"]


pytestmark = pytest.mark.usefixtures("here")


DECIDED = {
    "data": "x.jsonl", "baseline": "a.json", "model": "gpt2", "images": 1, "seq_len": 1, "global_batch": 1,
    "trust_remote_code": True, "workers": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDED)
def test_options_that_the_code_decides_are_refused_whatever_their_value(name):
    with pytest.raises(InputError, match=f"{name}: can't be used with script: "):
        subject_of(SearchOptions(**{"model": "", name: DECIDED[name]}), script=SCRIPT)
    code = UserTrainer(SearchOptions(model="", devices=2, workers=1), script=SCRIPT).code
    for script in (shlex.join(SCRIPT), [SCRIPT[0], Path(SCRIPT[1])]):
        assert UserTrainer(SearchOptions(model=""), script=script).code == code
    fleet = UserTrainer(SearchOptions(model="", devices=16, nodes=2, address="head:6379"), script=SCRIPT).options.fleet
    assert (fleet.engine, fleet.devices, fleet.nodes, fleet.workers) == ("ray", 16, 2, 1)


def test_two_trainings_at_once_are_refused():
    with pytest.raises(InputError, match="make_trainer and script are each a training of its own"):
        subject_of(SearchOptions(model=""), make_trainer=lambda: None, script=SCRIPT)
    with pytest.raises(InputError, match=r"knobs: is of a step of your own; only=\.\.\. names"):
        subject_of(SearchOptions(model="gpt2"), knobs=["precision"])


OWN_ARGUMENTS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "adamw_torch"}


def plan_of_script(fix=(), facts=None, hardware=None, **fields):
    """Return the plan for a script in whose process these fields were found."""
    options = SearchOptions(model="", device="cpu", fix=fix)
    defaults = {
        "spec": make_spec(source="own"), "task": Task.CAUSAL_LM, "sequence_length": 48, "arguments": OWN_ARGUMENTS,
        "fixed": {"learning_rate": 0.1}, "held": {"optim": "it hands over an optimizer", "adapter": "it has one"},
        "weights": "float32", **dict.fromkeys(("reorders", "pads", "normalizes"), True),
    }  # fmt: skip
    lengths = LengthProfile(samples=96, mean=20.0, minimum=4, median=20, p95=44, maximum=48)
    description = Description(facts=facts or make_facts(), lengths=lengths, own=OwnFound(**{**defaults, **fields}))
    start = dataclasses.replace(begun(options), hardware=hardware or make_hardware())
    return UserTrainer(options, script=SCRIPT).plan(start, Looked(found=description))


def test_a_loop_is_planned_as_it_is_for_a_rehearsal_alone_and_not_under_deepspeed(here, monkeypatch):
    def looked(request):
        raise LoopError("it made 20 optimizer steps")

    words = ["accelerate", "launch", "--num_processes", "2", *SCRIPT[1:]]
    subject, start = UserTrainer(SearchOptions(model=""), script=words), begun(SearchOptions(model="", devices=2))
    with pytest.raises(LoopError):
        subject.plan(start, looked)
    monkeypatch.setenv("AUTOTUNE_STAND_IN", "1")
    made = subject.plan(start, looked)
    assert (made.workload.own_code.is_loop, made.baseline.parallelism.world_size, made.record) == (True, 2, False)
    words[2:2] = ["--use_deepspeed"]
    with pytest.raises(InputError, match="a loop of its own under DeepSpeed can't be rehearsed"):
        UserTrainer(SearchOptions(model=""), script=words).plan(start, looked)


def test_the_codes_own_arguments_are_the_baseline_at_which_what_it_decides_is_held():
    made = plan_of_script()
    assert (made.baseline.per_device_train_batch_size, made.baseline.optim) == (4, "adamw_torch")
    assert (made.workload.global_batch_size, made.workload.tokens_per_sample) == (8, 20.0)
    assert made.workload.fixed_arguments == {"learning_rate": 0.1}
    held = made.workload.own_code.held
    assert (held["optim"].value, held["optim"].reason) == ("adamw_torch", "it hands over an optimizer")
    assert held["adapter"].value is None
    assert {c.optim for c in made.search_space.legal} == {"adamw_torch"}
    assert type(made).model_validate_json(made.model_dump_json()) == made
    assert made.record is False


def test_a_script_that_sees_several_gpus_trains_on_all_where_autotune_tunes_for_one(monkeypatch):
    monkeypatch.setattr("autotune.planning.user_code.cuda_count", lambda: 4)
    said = "copies the model to all of them (DataParallel), for steps of 32 samples; --devices 4 tunes for all"
    told = [sum(note.endswith(said) for note in plan_of_script(hardware=on).notes) for on in (make_gpu(count=1), None)]
    assert told == [1, 0]


def test_samples_longer_than_the_models_positions_are_the_codes_own_affair():
    made = plan_of_script(facts=make_facts(max_sequence_length=40))
    assert made.workload.sequence_length == 48
    assert sum("samples have up to 48 tokens" in note and "beyond the 40" in note for note in made.notes) == 1
    assert not any("samples have up to" in note for note in plan_of_script().notes)


def test_of_an_optimizer_of_the_codes_own_no_memory_is_told():
    for held, said in (({}, "the baseline needs"), ({"optim": "it has one"}, "; weights alone take")):
        assert sum(said in note for note in plan_of_script(held=held).notes) == 1


def test_weights_in_bf16_stay_so():
    held = {"precision": "the weights are bfloat16, as your code makes them"}
    made = plan_of_script(weights="bfloat16", held=held)
    assert made.baseline.precision == "pure_bf16"
    assert {c.precision for c in made.search_space.legal} == {"pure_bf16"}
    mixed = plan_of_script(weights="bfloat16", held=held, arguments={**OWN_ARGUMENTS, "bf16": True})
    assert mixed.baseline.precision == "bf16"


HUGE = {"per_device_train_batch_size": 2048, "gradient_accumulation_steps": 2048}


def test_arguments_that_no_search_can_start_from_are_refused_by_name():
    for arguments, said in (({"optim": "magic"}, "optim: transformers has no"), (HUGE, "the global batch .*: use at")):
        with pytest.raises(InputError, match=f"your TrainingArguments: {said}"):
            plan_of_script(arguments=arguments)


def test_the_command_that_started_a_search_is_told_for_scripts_alone_and_can_be_typed_again():
    options, module = SearchOptions(model="", memory_bytes=1 << 30, workers=1), code_of(["python", "-m", "pack.train"])
    code = code_of(["python", "train.py", "--name", "a b"])
    assert command(options, code) == "autotune script --memory 1GiB -- python train.py --name 'a b'"
    assert command(options, module).endswith("-- python -m pack.train")
    assert command(options, OwnCode(kind="pickle", shown="trainer Trainer", directory=str(Path.cwd()))) is None


def test_what_the_code_decides_can_not_be_fixed_at_another_value():
    assert plan_of_script(fix="optim=adamw_torch").baseline.optim == "adamw_torch"
    with pytest.raises(InputError, match="--fix optim=sgd: optim stays as it is: it hands over an optimizer"):
        plan_of_script(fix="optim=sgd")


KNOBS = ["per_device_train_batch_size", "precision"]
FACTOR = autotune.OwnKnob(choices=(4, 2), allowance="exact")


def make_step(config, accumulation_steps):
    return lambda: None


def asked(step=make_step, knobs=KNOBS, **options):
    return UserLoop(SearchOptions(**{"model": "", "device": "cpu", **options}), step, knobs).own


def test_a_step_may_take_the_accumulation_and_the_workload_that_has_it_survives_being_written():
    assert not asked(lambda config: print).takes_accumulation
    assert not asked(lambda config, rate=0.1: print).takes_accumulation
    knobs = {"precision": ["fp32"], "torch_compile_backend": [None, "inductor"], "dataloader_num_workers": [0, 2]}
    own = asked(knobs={**knobs, "tf32": [True, False], "optim": None})
    assert own.takes_accumulation
    workload = make_workload(own_step=own)
    assert Workload.model_validate_json(workload.model_dump_json()) == workload


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"step": 42}, "expected a function that takes a TrainConfig, not int"),
        ({"step": lambda: None}, "can't be called with a configuration"),
        ({"step": lambda config, other: None}, "can't be called with a configuration"),
        ({"knobs": None}, "say what your function honours"),
        ({"knobs": []}, "say what your function honours"),
        ({"knobs": "precision"}, "expected a list of names"),
        ({"knobs": ["precison"]}, "'precison' is no field of TrainConfig.*did you mean 'precision'"),
        ({"knobs": ["packing"]}, "your function makes the batches"),
        ({"knobs": ["parallelism"]}, "parallelism: --devices has the numbers of devices, and model_parallel"),
        ({"knobs": {"precision": ["fp23"]}}, "knobs: precision: 'fp23' is no value for it"),
        ({"knobs": {"precision": "fp32"}}, "knobs: precision: expected a list of values"),
        ({"knobs": {"precision": []}}, "knobs: precision: expected a list of values"),
        ({"knobs": {"precision": 5}}, "knobs: precision: expected a list of values, not 5"),
        ({"knobs": {"optim": [["sgd"]]}}, r"knobs: optim: \['sgd'\] is no value for it"),
        ({"knobs": {"adapter.foo": [1]}}, "knobs: 'adapter.foo' is no field of TrainConfig"),
        ({"knobs": [1]}, "knobs: 1 is no field of TrainConfig"),
        ({"seq_len": 64}, "seq_len can't be used with a step of your own, unless its model is named"),
        ({"space": "cpu"}, "both say what is varied"),
        ({"data": "x"}, "data can't be used with a step"),
        ({"check_loss": 20}, "check_loss can't be used with a step"),
        ({"engine": "ray"}, "engine: a step of your own runs on this machine"),
        ({"devices": 2, "model": "gpt2"}, "model: steps on several devices, or by knobs of your own, aren't predicted"),
        ({"knobs": {"optim": FACTOR}}, "knobs: optim means something else already; give your own knob another name"),
        ({"knobs": {"copy": FACTOR}}, "knobs: copy means something else already"),
        ({"knobs": {"factor": [2, 4]}}, "'factor' is no field of TrainConfig; declare one of your own by OwnKnob"),
        ({"knobs": {"factor": FACTOR}}, "can't be called with a configuration .accumulation_steps, factor.: got an"),
        ({"task": "causal-lm"}, "task can't be used with a step"),
        ({"images": 1}, "images can't be used with a step"),
        ({"recipe": "sft"}, "recipe can't be used with a step"),
    ],
)
def test_what_can_not_be_tuned_is_refused(given, said):
    with pytest.raises(InputError, match=said):
        asked(**given)


def parameters_of(knobs, usual="cpu") -> dict:
    return space_of(asked(knobs=knobs), usual).parameters


def test_a_knob_has_the_choices_and_the_order_of_the_devices_space_unless_its_own_are_named():
    assert asked(knobs=None, space="cpu").knobs == {}
    found = parameters_of(["optim", "precision"])
    assert list(found) == ["precision", "optim"]
    assert found["precision"].choices == ("bf16", "fp32", "pure_bf16")
    found = parameters_of({"precision": ["fp32", "bf16", "fp32"], "optim": None})
    assert found["precision"].choices == ("fp32", "bf16")
    twice = autotune.OwnKnob(choices=("a", "b", "a"), allowance="exact")
    space = space_of(asked(lambda config, order: print, {"order": twice}), "cpu")
    assert space.parameters["own.order"].choices == ("a", "b")
    assert "adafactor" in found["optim"].choices
    compiler = parameters_of(["torch_compile_backend"])["torch_compile_backend"]
    assert compiler.from_effort is autotune.Effort.QUICK  # what was named is tried whatever the effort
    assert list(parameters_of(["adapter"])) == ["adapter", "adapter.rank", "adapter.target_modules"]


def test_a_knob_without_usual_values_or_without_what_it_belongs_to_is_refused():
    with pytest.raises(InputError, match="quantization has no usual values; name them"):
        parameters_of(["quantization"])
    with pytest.raises(InputError, match="exists only beside dataloader_num_workers"):
        parameters_of(["dataloader_prefetch_factor"], "default")
    given = parameters_of({"per_device_train_batch_size": range(1, 5)})
    assert given["per_device_train_batch_size"].choices == (1, 2, 3, 4)


def plan_of(hardware=None, knobs=KNOBS, **options):
    given = SearchOptions(model="", device="cpu", global_batch=16, **options)
    start = dataclasses.replace(begun(given), hardware=hardware or make_hardware())
    return UserLoop(given, make_step, knobs).plan(start, Looked())


def test_every_knob_that_was_named_is_varied_and_no_other():
    everything = [
        *KNOBS, "tf32", "optim", "checkpointing", "attn_implementation", "use_liger_kernel", "torch_compile_backend",
        "adapter", "dataloader_num_workers",
    ]  # fmt: skip
    gpu = make_gpu(versions={**VERSIONS, "flash-attn": "2.8", "triton": "3.7", "liger-kernel": "0.6"})
    space = plan_of(gpu, everything, allow=Allowance.METHOD).search_space
    names = [d.name for d in space.dimensions if not d.name.startswith("adapter.")]
    assert names == [name for name in parameters_of(everything, "default") if "adapter." not in name]
    open_choices = {d.name: d.choices for d in space.dimensions}
    for name in everything:
        assert len(open_choices[name]) > 1, (name, space.left_out)


def test_the_first_values_that_are_named_are_the_baselines_unless_it_is_given(tmp_path):
    knobs = {"per_device_train_batch_size": [3, 2, 4], "precision": ["bf16", "fp32"], "optim": None}
    found = plan_of(knobs=knobs).baseline
    assert (found.per_device_train_batch_size, found.precision, found.optim) == (2, "bf16", "adamw_torch_fused")
    given = tmp_path / "mine.json"
    given.write_text(json.dumps({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}))
    found = plan_of(knobs=knobs, baseline=str(given)).baseline
    assert (found.per_device_train_batch_size, found.precision) == (2, "fp32")


def test_a_knob_that_is_honoured_can_be_fixed_or_searched_alone_and_no_other():
    configs = plan_of(fix={"precision": "bf16"}).every_config()
    assert {config.precision for config in configs} == {"bf16"}
    assert {config.per_device_train_batch_size for config in configs} > {8}
    assert {config.per_device_train_batch_size for config in plan_of(only="precision").every_config()} == {8}
    for option, value in (("fix", "optim=sgd"), ("only", "optim")):
        with pytest.raises(InputError, match=f"--{option} optim: your function isn't said to honour it"):
            plan_of(**{option: value})


def plan_of_own_knobs(**options):
    knobs = {"factor": FACTOR, "order": autotune.OwnKnob(choices=("as written", "random"), allowance="method")}
    given = options_of(SearchOptions, {"model": "", "device": "cpu", "global_batch": 16, **options}, knobs)
    step = lambda config, factor, order: make_step(config)  # noqa: E731
    return UserLoop(given, step, knobs).plan(begun(given), Looked())


def test_a_knob_of_the_loops_own_is_searched_from_its_first_value_as_far_as_its_class_is_allowed():
    free, strict = plan_of_own_knobs(allow="method"), plan_of_own_knobs(allow="numerics")
    assert free.baseline.own.model_dump() == {"factor": 4, "order": "as written"}
    assert any("that your function honours factor, order is taken on trust" in note for note in free.notes)
    found = {(c.own.factor, c.own.order) for c in free.every_config()}
    assert found == set(itertools.product((4, 2), ("as written", "random")))
    assert {(c.own.factor, c.own.order) for c in strict.every_config()} == {(4, "as written"), (2, "as written")}
    other = next(c for c in free.every_config() if c.own.factor == 2 and c.own.order == "as written")
    assert shown_changes(changes(other, free)) == "factor 2"
    assert put_back(other, free.baseline, ["own.factor"]) == free.baseline
    assert TrainConfig.model_validate_json(other.model_dump_json()) == other != free.baseline


def test_a_knob_of_the_loops_own_can_be_fixed_or_searched_alone():
    def orders(**options):
        return {(c.own.factor, c.own.order) for c in plan_of_own_knobs(**options, allow="method").every_config()}

    assert orders(fix={"factor": 2}) == orders(fix="Factor=2") == {(2, "as written"), (2, "random")}
    assert orders(only=["factor"]) == {(4, "as written"), (2, "as written")}
    knobs = {"devices": FACTOR, "bf16": autotune.OwnKnob(choices=(False, True), allowance="numerics")}
    options = options_of(SearchOptions, {"model": "", "fix": {"devices": 2, "bf16": True}}, knobs)
    assert options.fix == ("devices=2", "bf16=true")
    with pytest.raises(InputError, match="--fix factor=3: expected --fix factor=4 or --fix factor=2"):
        autotune.find(step=lambda config, factor: None, knobs={"factor": FACTOR}, fix={"factor": 3})


@pytest.mark.parametrize(
    ("choices", "allowance", "said"),
    [
        (("a",), "exat", "allowance: expected exact, numerics, .* .did you mean 'exact'"),
        ("ab", "exact", "choices: expected a list of values, the baseline's first"),
        ({"a", "b"}, "exact", "choices: expected a list of values"),
        (([1],), "exact", r"choices: \[1\]: expected true, false, a finite number, text"),
        ((1.0, float("inf")), "exact", "choices: inf: expected true"),
    ],
)
def test_a_knob_of_ones_own_that_is_declared_wrongly_is_refused_in_one_line(choices, allowance, said):
    with pytest.raises(InputError, match=f"^OwnKnob: {said}"):
        autotune.OwnKnob(choices=choices, allowance=allowance)


def test_a_loop_is_searched_on_several_devices_which_may_share_a_sample():
    def shapes(**options):
        given = SearchOptions(model="", device="cpu", global_batch=16, **options)
        knobs = {"model_parallel": [1, 2]} if options["devices"] != "1" else {"optim": None}
        spread = (c.parallelism for c in UserLoop(given, make_step, knobs).plan(begun(given), Looked()).every_config())
        return {(s.world_size, s.model_parallel, s.data_parallel) for s in spread}

    assert shapes(devices="1") == {(1, 1, 1)}
    assert shapes(devices="2") == {(2, 1, 2), (2, 2, 1)}
    assert shapes(devices="1,2") == {(1, 1, 1), (2, 1, 2), (2, 2, 1)}


def test_devices_that_share_each_sample_count_once_in_the_global_batch(tmp_path):
    (tmp_path / "mine.json").write_text('{"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5}')
    given = SearchOptions(model="", device="cpu", devices=2, baseline="mine.json")
    plan = UserLoop(given, make_step, {"model_parallel": [2]}).plan(begun(given), Looked())
    assert plan.workload.global_batch_size == 15
    assert plan.workload.accumulation_steps(plan.baseline) == 5
    assert plan.baseline.parallelism == Parallelism(world_size=2, model_parallel=2)


@pytest.mark.parametrize(("devices", "choices"), [("2", [3]), ("1", [4, 1])])
def test_devices_that_can_not_share_samples_as_the_baseline_has_it_are_refused(devices, choices):
    given = SearchOptions(model="", device="cpu", global_batch=16, devices=devices)
    with pytest.raises(InputError, match=f"model_parallel {choices[0]} does not divide the {devices} devices"):
        UserLoop(given, make_step, {"model_parallel": choices}).plan(begun(given), Looked())


def test_nothing_is_promised_that_isnt_done_and_all_micro_batches_are_run():
    plan = plan_of(max_trials=3)
    assert (plan.workload.task, plan.soak, plan.loss_steps, plan.record) == (Task.OWN, False, 0, False)
    assert any("taken on trust" in note for note in plan.notes)
    assert any("evaluated or saved" in note for note in plan.notes)
    assert any("3 trials (--max-trials)" in note for note in plan.notes)
    config = TrainConfig(per_device_train_batch_size=2)
    assert plan.request_of(config, Purpose.SEARCH, number=1, timeout_s=1.0).accumulation_steps == 8
    assert make_plan().request_of(config, Purpose.SEARCH, number=1, timeout_s=1.0).accumulation_steps == 2


def test_a_step_of_another_micro_batch_is_examined_if_the_global_batch_is_held():
    class Seen(Looked):
        def __call__(self, request):
            others.append(request.other)
            return super().__call__(request)

    others = []
    for batch in (16, "any"):
        given = SearchOptions(model="", device="cpu", global_batch=batch)
        UserLoop(given, make_step, KNOBS).plan(begun(given), Seen())
    assert others == [4, None]


def test_what_cant_be_pickled_is_named(tmp_path):
    lock = threading.Lock()
    step = lambda config: lock.acquire  # noqa: E731
    with pytest.raises(InputError, match="can't be handed to another process: TypeError: cannot pickle"):
        autotune.find(step=step, knobs=KNOBS, device="cpu", run_dir=tmp_path)
    with pytest.raises(InputError, match="nothing to tune"):
        autotune.find()
    assert not (tmp_path / "data" / STEP_FILE).exists()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A whole search for a loop whose time is known: a micro-batch takes 5 ms in bf16, 20 ms otherwise."""
    run = tmp_path_factory.mktemp("own") / "run"

    def make(config, accumulation_steps):
        import time

        if config.precision == "pure_bf16":
            raise ValueError("weights stay in fp32")
        pause_s = accumulation_steps * (0.005 if config.precision == "bf16" else 0.02)
        return lambda: time.sleep(pause_s)

    return autotune.find(step=make, knobs=KNOBS, global_batch=16, effort="quick", device="cpu", run_dir=run), run


@pytest.mark.slow
def test_the_answer_says_what_it_doesnt_know(found):
    result, run = found
    assert any("taken on trust" in note for note in result.notes)
    assert any("losses were not compared" in note for note in result.proof_notes)
    assert result.training_arguments("out").per_device_train_batch_size == 16
    for made in (result.build_model, lambda: result.training_data(4)):
        with pytest.raises(InputError, match="makes its own model and data"):
            made()
    assert autotune.load(run / "best-config.json") == result
    assert "own-step.pkl" in {p.name for p in (run / "data").iterdir()}


@pytest.mark.slow
def test_a_search_for_a_loop_goes_on_where_it_was_stopped(found, tmp_path):
    shutil.copytree(found[1], tmp_path / "run")
    last = sorted((tmp_path / "run" / "trials").iterdir())[-1]
    shutil.rmtree(last)
    before = len(RunDirectory(tmp_path / "run").results())
    result = autotune.resume(tmp_path / "run")
    assert len(RunDirectory(tmp_path / "run").results()) > before
    assert result.best.config.precision == "bf16"


@pytest.mark.slow
def test_with_the_model_named_the_search_is_led_by_predictions(tiny_llama, tmp_path):
    config = str(tiny_llama / "config.json")

    def make(asked, accumulation_steps):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(0, 500, (asked.per_device_train_batch_size, 32))

        def step():
            for _ in range(accumulation_steps):
                loss = model(input_ids=ids, labels=ids).loss / accumulation_steps
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss * accumulation_steps

        return step

    result = autotune.find(
        str(tiny_llama), step=make, knobs=["per_device_train_batch_size"], seq_len=32, effort="quick", device="cpu",
        max_trials=3, run_dir=tmp_path / "run",
    )  # fmt: skip
    assert any("taken on trust" in note for note in result.notes)
    tried = [t for t in result.trials if t.number is not None]
    assert all(t.prediction is not None for t in tried)
    assert result.best.tokens_per_second == pytest.approx(32 * result.best.measurement.samples_per_second)
