"""Where the trials of a search run, what can't go together, where its answer is wanted, and what it would do."""

from __future__ import annotations

import errno
import itertools
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from exporting import answer_of
from factories import (
    legal_points,
    make_config,
    make_facts,
    make_gpu,
    make_hardware,
    make_plan,
    make_space_file,
    make_workload,
)
from predicted_space import GB, SPACE, make_model_of
from profiles import make_model, make_profile

from autotune.cost.family import family_of
from autotune.errors import InfrastructureError, InputError
from autotune.execution.places import Place
from autotune.planning.options import SearchOptions
from autotune.search.candidates import Candidates
from autotune.search.run import backend_of, check_fleet, deliver, preview, wanted_file, with_network
from autotune.search.sampler import CostModelSampler
from autotune.space.file import load_space
from autotune.tuning_result import load
from autotune.values.config import Allowance
from autotune.values.problem import Fleet


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"address": "auto"}, "--address auto: this is about a cluster; add --engine ray"),
        ({"kind": "H100"}, "--kind H100: this is about a cluster; add --engine ray"),
        ({"nodes": 2}, "--nodes 2 --devices 1: say how many devices all of them have together"),
        ({"nodes": 2, "devices": 3}, "--nodes 2 --devices 3: they aren't shared equally"),
        ({"nodes": 2, "devices": "all"}, "--devices all: with --engine ray say how many"),
        ({"workers": 2, "devices": "all"}, "--devices all: with --workers 2 say how many"),
        ({"workers": 2, "device": "cuda:1"}, "--device cuda:1: names one device alone; with --workers 2 say --device"),
    ],
)
def test_what_can_not_go_together_is_refused(fields, said):
    with pytest.raises(InputError, match=said):
        check_fleet(SearchOptions(model="m", **fields))


def test_the_network_is_measured_with_all_devices_though_the_baseline_is_of_fewer():
    plan = make_plan(hardware=make_gpu(count=16), workload=make_workload(global_batch_size=64))
    assert plan.baseline.per_device_train_batch_size * 16 > 64
    asked = []
    pool = SimpleNamespace(network_gb_s=lambda request: asked.append(request.config.parallelism.world_size) or 12.5)
    assert with_network(plan, pool).hardware.network_gb_s == 12.5
    assert asked == [16]


@pytest.mark.parametrize("workers", [None, 1])
def test_one_place_is_a_pool_of_one(tmp_path, workers):
    with backend_of(Fleet(workers=workers), tmp_path, device="cpu") as made:
        assert made.pool is made.asker
        assert made.pool.free() == 1
        assert made.allotment.hardware.cores == len(os.sched_getaffinity(0))


def test_several_places_are_a_pool_in_a_search_that_goes_on_too(tmp_path, monkeypatch):
    refused = pytest.raises(InputError, match="--workers 2: the CPU runs one trial at a time")
    with refused, backend_of(Fleet(workers=2), tmp_path, device="cpu"):
        pass
    two = tuple(Place(shown=f"place {number}", devices=("cpu",)) for number in (0, 1))
    monkeypatch.setattr("autotune.search.run.places_of", lambda hardware, count, each: two)
    for planned in (None, make_hardware()):
        with backend_of(Fleet(workers=2), tmp_path, device="cpu", planned=planned) as made:
            assert made.pool.free() == 2
            assert made.allotment.notes[0].startswith("2 trials at a time, on place 0, place 1; finals and checks run")
            assert planned in (None, made.allotment.hardware)


def test_an_output_is_known_by_its_place_and_what_it_held_stays_until_there_is_an_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "best.json"
    assert (wanted_file("best.json"), wanted_file(None)) == (str(path), None)
    assert not path.exists()
    path.write_text('{"autotune_version": "of yesterday"}')
    deliver(None, wanted_file(path), tmp_path)
    assert path.read_text() == '{"autotune_version": "of yesterday"}'
    result = answer_of(make_config(16))
    deliver(result, wanted_file(path), tmp_path)
    assert load(path) == result
    deliver(result, None, tmp_path)


def test_an_output_that_can_not_be_written_is_refused_before_and_after_and_a_full_disk_is_no_bad_input(
    tmp_path, monkeypatch
):
    with pytest.raises(InputError, match="--output no/such/place"):
        wanted_file("no/such/place.json")
    with pytest.raises(InputError, match=rf"can't be written: .*; the answer is in {tmp_path}"):
        deliver(answer_of(make_config(16)), str(tmp_path / "gone" / "best.json"), tmp_path)
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(InfrastructureError, match=r"best\.json: can't be written: No space left on device"):
        deliver(answer_of(make_config(16)), str(tmp_path / "best.json"), tmp_path)
    assert not list(tmp_path.iterdir())


# What a search would do: its knobs, what is refused and why, and its first trials.


def test_what_may_be_tried_is_counted_with_its_knobs_and_the_first_trials_are_predicted():
    plan, model = make_plan(space=SPACE, memory_bytes=100 * GB), make_model_of()
    found = preview(plan, model)
    assert found.knobs == {
        "precision": ("fp32", "bf16"),
        "checkpointing": ("none", "full"),
        "micro-batch": ("1", "2", "4", "8", "16"),
    }
    assert (found.configurations, found.refused) == (20, {})
    first, second, *others = found.first_trials
    assert (first.config, first.changes) == (plan.baseline, ())
    assert second.config.precision == "bf16"
    assert second.predicted == CostModelSampler(plan, model).prediction(second.config)
    assert second.predicted.samples_per_second > first.predicted.samples_per_second
    assert len({trial.config for trial in (first, second, *others)}) == len(others) + 2


def test_what_is_refused_is_grouped_by_reason():
    plan = make_plan(space=SPACE, memory_bytes=3 * GB, allowance=Allowance.EXACT)
    found = preview(plan, make_model_of())
    assert found.knobs.keys() == {"checkpointing", "micro-batch"}
    ((reason, values),) = found.values_refused.items()
    assert values == ("precision bf16",)
    assert "--allow exact does not admit" in reason
    assert found.refused == {"predicted to need more than the budget of 2.79 GiB": 10 - found.configurations}
    assert 0 < found.configurations < 10
    experts = make_plan(space=make_space_file({"experts_implementation": [None, "grouped_mm", "eager"]}))
    refused = preview(experts, make_model_of()).values_refused
    assert refused == {"llama has no experts": ("experts grouped_mm", "experts eager")}


def everything_known(plan):
    """A cost model that has traced all families of a plan."""
    families = dict.fromkeys(family_of(config, plan.hardware) for config in plan.search_space.legal)
    profiles = [make_profile(family) for family in families]
    return make_model(profiles, workload=plan.workload, hardware=plan.hardware)


MODELS = {
    "plain": make_facts(),
    "experts": make_facts(experts=8, experts_implementations=("grouped_mm", "batched_mm", "eager")),
    "without attention or checkpointing": make_facts(attn_implementations=(), supports_checkpointing=False),
    "a head whose loss is chunked": make_facts(chunks_loss=True, layers=24),
    "without linear layers": make_facts(linear_modules=(), has_dropout=True, batch_coupled="batch norm"),
}
DEVICES = {"a CPU": make_hardware(), "a GPU": make_gpu(), "a GPU without bf16": make_gpu(capability=(7, 0))}
SMALL = {
    *(("plain", device) for device in DEVICES), ("experts", "a CPU"), ("without attention or checkpointing", "a GPU"),
    ("a head whose loss is chunked", "a GPU without bf16"), ("without linear layers", "a CPU"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "device"),
    [pytest.param(*c, marks=() if c in SMALL else pytest.mark.slow) for c in itertools.product(MODELS, DEVICES)],
)
def test_every_legal_point_is_ranked_and_counted(model, device):
    made = {"space": load_space("default"), "facts": MODELS[model], "hardware": DEVICES[device], "memory_bytes": 10**15}
    plan = make_plan(**made, workload=make_workload(global_batch_size=2), baseline=make_config(1))
    model, space = everything_known(plan), plan.search_space
    legal = len(list(legal_points(space)))
    ranked = Candidates(model, plan)
    assert len(ranked.ranked) * len(space.loadings) == legal
    assert ranked.has_all_predictions
    assert preview(plan, model).configurations == legal + (space.refusal(plan.baseline) is not None)


def test_the_last_of_many_thousand_points_is_ranked_first_if_it_alone_fits():
    space = make_space_file(
        {
            "precision": ["fp32", "bf16", "pure_bf16"],
            "optim": ["adamw_torch_fused", "adamw_torch", "adafactor"],
            "per_device_train_batch_size": "lattice",
            "checkpointing": ["none", "full"],
            "adapter": [None, "lora"],
            "adapter.rank": {"choices": [4, 8, 16, 32, 64], "when": {"adapter": ["lora"]}},
            "dataloader_num_workers": list(range(64)),
            "dataloader_pin_memory": [False, True],
        }
    )
    facts, memory = make_facts(parameters=7 * 10**9), 18 * 2**30
    plan = make_plan(space=space, facts=facts, hardware=make_gpu(), memory_bytes=memory)
    model = everything_known(plan)
    found = preview(plan, model)
    assert sum(found.refused.values()) + found.configurations == 3 * 3 * 5 * 2 * 6 * 128
    _, *others = found.first_trials
    assert others
    for trial in others:
        assert (trial.config.precision, trial.config.adapter.kind) == ("pure_bf16", "lora")
        assert trial.predicted.samples_per_second > 0
