"""One training over two nodes of a Ray cluster, both of them this machine: what is measured, what fails, what dies."""

import contextlib
import subprocess

import psutil
import pytest
from benches import LONG
from misbehaving_ranks import PAUSED_FILE
from ray_makers import is_of_a_trial, nodes_of_trials
from running import process, until

import autotune
from autotune.errors import InfrastructureError
from autotune.execution.cluster import Cluster, joined
from autotune.execution.environment import shared_files
from autotune.execution.ray_pool import RayPool, scratch
from autotune.execution.runner import trial_directory
from autotune.values.budget import SoakTask
from autotune.values.config import Parallelism
from autotune.values.problem import Fleet
from autotune.values.trial import Measurement, Purpose, TrialStatus

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

TWO = {"parallelism": Parallelism(world_size=2)}


@pytest.fixture(scope="module")
def pair(machines, tmp_path_factory) -> Cluster:
    """A cluster whose trials have two devices, on two nodes."""
    with contextlib.chdir(tmp_path_factory.mktemp("project")), joined(machines.address) as made:
        made.allotment(Fleet(engine="ray", devices=2, nodes=2), "cpu", None)
        yield made


@pytest.fixture
def make_pool(pair, tmp_path):
    with contextlib.ExitStack() as stack:

        def make(maker: str) -> RayPool:
            (directory := tmp_path / f"run of {maker}").mkdir()
            return stack.enter_context(RayPool(directory, pair, maker=f"ray_makers:{maker}"))

        yield make


def test_a_trial_of_two_nodes_has_a_rank_on_each(make_pool, pair, bench, tmp_path):
    """Short, so that every run of the tests has it: what the other tests show holds for as long as this does."""
    pool = make_pool("behaving")
    assert pool.free() == 1
    request = bench.request(config=TWO, workload={"global_batch_size": 8}, limits={"measure_steps": 3})
    assert pool.network_gb_s(request) > 0.01
    result = pool.run(request)
    assert isinstance(result.outcome, Measurement), result.outcome
    assert result.outcome.effects["parallelism"].startswith("DDP over 2")
    shown = {f"{node.address} ({node.id[:6]})" for node in pair.nodes()}
    assert len(shown) == 2
    assert set(result.place.split(" + ")) == shown
    directory = trial_directory(tmp_path / "run of behaving", request.number)
    ranks = [Measurement.model_validate_json((directory / f"rank-{n}.json").read_bytes()) for n in (0, 1)]
    assert result.outcome.step_times_s == max((rank.step_times_s for rank in ranks), key=sum)
    assert {"log.txt", "log-1.txt"} <= {file.name for file in directory.iterdir()}


@pytest.mark.slow
def test_a_node_that_is_lost_while_the_network_is_measured_ends_the_search_in_words(make_pool, bench):
    with pytest.raises(InfrastructureError, match="the cluster lost a node, or what ran on it"):
        make_pool("dying").network_gb_s(bench.request(config=TWO))


@pytest.mark.slow
def test_a_loss_run_of_two_nodes_tells_the_losses_of_one_process(make_pool, bench, tmp_path):
    bench.assert_losses_of_one(tmp_path, make_pool("behaving"), TWO)


@pytest.mark.slow
def test_a_training_that_one_node_is_enough_for_runs_on_one(make_pool, bench):
    result = make_pool("behaving").run(bench.request())
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert result.measurement.effects["parallelism"] == "one device"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "status", "cause"),
    [
        ("rank_1_has_less_memory", "out of memory", "rank 1: "),
        ("rank_1_is_killed", "crashed", "rank 1: killed by SIGKILL"),
        ("rank_1_raises_an_error", "crashed", "rank 1: ZeroDivisionError: division by zero"),
        ("rank_1_sleeps", "timed out", "no result within 20 s"),
    ],
)
def test_the_node_that_fails_ends_the_trial_with_its_cause_on_both(make_pool, bench, what, status, cause):
    before, pool = shared_files(), make_pool(what)
    config = {**TWO, "per_device_train_batch_size": 256}
    limits = {**LONG, "memory_bytes": 640 << 20, "timeout_s": 20 if "sleeps" in what else 3600}
    result = pool.run(bench.request(config=config, limits=limits))
    assert result.status == status, result.outcome
    assert result.outcome.cause.startswith(cause)
    assert not [p for p in psutil.process_iter() if is_of_a_trial(p)]
    assert shared_files() <= before
    assert pool.free() == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the_first_step", "a_measured_step", "saving"])
def test_a_trial_whose_node_dies_runs_again_on_others(make_pool, machines, bench, where):
    pool, third = make_pool(f"rank_1_pauses_in_{where}"), machines.add_node(num_cpus=1)
    task = SoakTask(eval_batch_sizes=(8,)) if where == "saving" else None
    request = bench.request(config=TWO, limits={**LONG, "measure_steps": 20})
    pool.begin(request.model_copy(update={"task": task, "purpose": Purpose.SOAK if task else Purpose.SEARCH}))
    trials = f"trials/{request.number:04d}"
    until(lambda: [*scratch(pool._search).glob(f"*/{trials}/{PAUSED_FILE}")])
    killed = nodes_of_trials()[1]
    (node,) = (node for node in {*machines.worker_nodes, third} if node.node_id == killed)
    node.kill_raylet()  # as a power cut does
    result = pool.wait()
    machines.remove_node(node)
    machines.add_node(num_cpus=1)  # for the next
    assert result.status is TrialStatus.COMPLETED, result.outcome
    assert bool(result.measurement.soaked) == (where == "saving")
    assert "it ran again" in result.warnings[0]
    assert killed[:6] in result.warnings[0]
    assert killed[:6] not in result.place


@pytest.mark.slow
def test_a_search_over_two_nodes_that_was_killed_leaves_nothing_and_goes_on(machines, tiny_llama, tmp_path):
    options = ["--device", "cpu", "--devices", 2, "--nodes", 2, "--address", machines.address, "--effort", "quick"]
    (tmp_path / "texts.txt").write_text("".join(f"{'word ' * (1 + n % 9)}\n" for n in range(40)))
    options += ["--data", "texts.txt", "--max-trials", 2, "--run-dir", "run"]
    command = ("-m", "autotune", "find", "--model", tiny_llama, *options)
    with (tmp_path / "log.txt").open("w") as log:
        search = subprocess.Popen(**process(*command, cwd=tmp_path), stdout=log, stderr=log)
    until(lambda: [*tmp_path.glob("run/trials/*/result.json")] and any(map(is_of_a_trial, psutil.process_iter())))
    search.kill()
    search.wait()
    until(lambda: not any(map(is_of_a_trial, psutil.process_iter())), limit_s=60)
    before = {path: path.read_bytes() for path in tmp_path.glob("run/trials/*/result.json")}
    result = autotune.resume(tmp_path / "run", quiet=True)
    assert before.items() <= {path: path.read_bytes() for path in tmp_path.glob("run/trials/*/result.json")}.items()
    numbers = [trial.number for trial in result.trials if trial.number is not None]
    kept = [int(path.parent.name) for path in tmp_path.glob("run/trials/*/result.json")]
    assert sorted(numbers) == sorted(kept)  # one that ran when the search was killed runs again under another number
    assert result.best.measurement is not None


SCRIPT = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

model = LlamaForCausalLM(LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=2))
rows = [{"input_ids": list(range(n, n + 16)), "labels": list(range(n, n + 16))} for n in range(64)]
arguments = TrainingArguments("out", per_device_train_batch_size=4, use_cpu=True, report_to=[])
Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8]).train()
"""


@pytest.mark.slow
def test_a_script_is_searched_over_two_nodes_looked_at_on_one_and_launched_on_each(machines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    limits = {"max_trials": 1, "effort": "quick", "quiet": True, "run_dir": tmp_path / "run"}
    script = ["torchrun", "--nnodes", "2", "--nproc_per_node", "1", "train.py"]
    result = autotune.find(script=script, device="cpu", address=machines.address, **limits)
    assert result.workload.global_batch_size == 8
    assert (result.hardware.count, result.hardware.nodes) == (2, 2)
    assert result.hardware.network_gb_s > 0.01
    assert result.baseline.measurement.effects["parallelism"].startswith("DDP over 2")
    assert "--nnodes 2 " in result.launch_commands[0]
    assert (tmp_path / "run" / "data" / "own-lengths.npy").exists()
