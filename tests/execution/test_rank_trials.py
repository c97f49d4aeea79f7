"""Real trials of two ranks on the CPU: what they measure, and that the first to fail ends them with its cause."""

import json
import socket

import benches
import misbehaving_ranks
import pytest
import torch
from benches import LONG, Bench, is_running
from optimizer_steps import CASES_FILE, MODELS, STEPS_FILE, assert_same_step, build, reference

from autotune.execution.environment import shared_files
from autotune.execution.job import Job
from autotune.training.resolve import resolve
from autotune.values.budget import SoakTask
from autotune.values.config import Parallelism
from autotune.values.trial import Measurement, TrialStatus

MIB = 1 << 20
TWO = {"parallelism": Parallelism(world_size=2)}


def test_two_ranks_share_a_global_batch_and_each_has_a_log_and_an_outcome(bench):
    result = bench.run(config=TWO, workload={"global_batch_size": 8}, limits={"measure_steps": 3})
    assert isinstance(result.outcome, Measurement), result.outcome
    assert result.outcome.effects["parallelism"].startswith("DDP over 2")
    directory = bench.directory(result)
    ranks = [Measurement.model_validate_json((directory / f"rank-{n}.json").read_bytes()) for n in (0, 1)]
    assert result.outcome.step_times_s == max((rank.step_times_s for rank in ranks), key=sum)
    steps = result.outcome.step_times_s
    assert result.outcome.samples_per_second == pytest.approx(8 * len(steps) / sum(steps))
    assert {"log.txt", "log-1.txt"} <= {file.name for file in directory.iterdir()}


@pytest.mark.slow
def test_a_loss_run_of_two_ranks_tells_the_losses_and_the_dropout_of_one_process(bench, tmp_path):
    bench.assert_losses_of_one(tmp_path, bench.runner, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"dataloader_num_workers": 1}, {"adapter": {"rank": 4}}, {"precision": "bf16"}])
def test_a_soak_of_two_ranks_saves_and_evaluates(bench, config):
    found = bench.checked(SoakTask(eval_batch_sizes=(8, 4)), config={**TWO, **config})
    assert found.soaked.eval_batch_size == 8
    assert found.soaked.checkpoint_bytes


@pytest.mark.slow
def test_a_soak_whose_evaluation_does_not_fit_ends_for_all_ranks(bench, wide_llama):
    wide = {"model": resolve(str(wide_llama)), "sequence_length": 128}  # whose logits take 16 MiB a sample
    task, limits = SoakTask(eval_batch_sizes=(64, 4)), {"memory_bytes": 700 * MIB}
    result = bench.check(task, config=TWO, workload=wide, limits=limits)
    assert result.status is TrialStatus.OUT_OF_MEMORY
    assert "while evaluating with a batch of 64" in result.outcome.cause


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("what", "status", "cause"),
    [
        ("have_less_memory", "out of memory", "rank 1: "),
        ("be_killed", "crashed", "rank 1: killed by SIGKILL"),
        ("raise_an_error", "crashed", "rank 1: ZeroDivisionError: division by zero"),
    ],
)
def test_the_first_rank_that_fails_ends_the_trial_with_its_cause(bench, monkeypatch, what, status, cause, workers):
    before = shared_files()
    misbehaving_ranks.plan(bench.run_directory, 1, what)
    monkeypatch.setattr(bench.runner, "_entry", "misbehaving_ranks:behave")
    config = {**TWO, "per_device_train_batch_size": 256, "dataloader_num_workers": workers}
    result = bench.run(config=config, limits={**LONG, "memory_bytes": 640 * MIB, "timeout_s": 3600})  # as no test may
    assert result.status == status
    assert result.outcome.cause.startswith(cause)
    if status == "out of memory":
        assert "were asked for" in result.outcome.cause
    left = bench.process(result)
    assert len(left["pids"]) == 2
    assert not any(map(is_running, left["pids"]))
    with socket.create_server(("127.0.0.1", left["port"])):
        pass  # nobody listens there
    assert shared_files() <= before


@pytest.mark.slow
def test_where_a_fork_cannot_be_had_each_rank_is_a_fresh_interpreter(model, tmp_path, monkeypatch):
    monkeypatch.setattr("benches.LIGHT", benches.LIGHT.replace("True", "False"))
    monkeypatch.setattr("autotune.execution.launch.launch_command", benches.light_command)
    with (bench := Bench(model, tmp_path / "run")).runner:
        assert bench.measured(config=TWO).effects["parallelism"].startswith("DDP over 2")


CASES = [(name, accumulation) for name in MODELS for accumulation in (1, 4)]


@pytest.fixture(scope="module")
def steps(bench):
    directory = bench.run_directory / "losses"
    directory.mkdir()
    (directory / CASES_FILE).write_text(json.dumps(CASES))
    launcher = bench.runner.start()
    launcher.send(Job(place=0, directories=(directory,), entry="optimizer_steps:take_steps", timeout_s=200, ranks=2))
    assert launcher.reply(300)[1].returncodes == [0, 0], (directory / "log.txt").read_text()
    return torch.load(directory / STEPS_FILE)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accumulation"), CASES)
def test_two_ranks_take_the_step_of_one_process(steps, name, accumulation):
    """Samples differ in length, and so do the ranks' labels: a mean of the ranks' means would be wrong."""
    assert_same_step(steps[name, accumulation], reference(build(name), name))
