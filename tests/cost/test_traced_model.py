"""One device's part of a model; a trace is the same on the meta device and of real tensors, or refused in one line."""

from __future__ import annotations

import json

import pytest

from autotune.cost import profiler
from autotune.cost.family import Family, Shape
from autotune.cost.memory import components
from autotune.cost.profile import ACTIVATION, total_bytes
from autotune.cost.traced_model import is_fake
from autotune.errors import InputError
from autotune.training.resolve import resolve
from autotune.values.model import Task


def test_a_device_has_its_part_of_a_samples_tokens_and_attends_to_all(profile_of):
    whole, half = (
        profile_of("llama", attn_implementation="sdpa", sequence_parallel=n, device="cuda", dtype="bfloat16")
        for n in (1, 2)
    )
    assert half.parameters == whole.parameters
    assert half.hidden_bytes == whole.hidden_bytes / 2
    assert half.needed_flops.per_sample == pytest.approx(whole.needed_flops.per_sample / 2)
    activations = [one.storages.alive[:, ACTIVATION, 1].max() for one in (whole, half)]
    assert activations[1] == pytest.approx(activations[0] / 2, rel=0.01)


@pytest.mark.parametrize(
    "model", ["llama", "mixtral", *(pytest.param(m, marks=pytest.mark.slow) for m in ("bert", "t5"))]
)
def test_layers_and_what_is_outside_of_them_make_the_model(profile_of, model):
    found = profile_of(model)
    whole = total_bytes(found.outside) + found.layers * total_bytes(found.layer)
    # Of T5 the decoder's layers are the larger ones.
    assert whole == pytest.approx(total_bytes(found.parameters), rel=0.3 if model == "t5" else 1e-9)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}
SHAPE = Shape(task=Task.CAUSAL_LM, length=16)
FAMILY = Family(device="cuda", dtype="float32", autocast="bfloat16", checkpointing="full", attn_implementation="sdpa")


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return resolve(str(directory))


@pytest.fixture
def only(monkeypatch):
    def leave(*ways):
        monkeypatch.setattr(profiler, "WAYS", ways)

    return leave


def test_real_tensors_give_what_the_meta_device_gives(spec, only):
    meta = profiler.profile(spec, FAMILY, SHAPE)
    only("run")
    run = profiler.profile(spec, FAMILY, SHAPE)
    assert (meta.traced_by, run.traced_by) == ("meta", "run")
    for accumulation in (1, 2):
        assert components(run, "sgd", 3, accumulation) == components(meta, "sgd", 3, accumulation)
    assert run.needed_flops == meta.needed_flops


def test_fake_tensors_serve_where_the_meta_device_does_not(spec, monkeypatch):
    on_meta = profiler.micro_step

    def fails_on_meta(model, *args):
        if next(model.parameters()).is_meta and not is_fake():
            raise NotImplementedError("no meta kernel")
        return on_meta(model, *args)

    monkeypatch.setattr(profiler, "micro_step", fails_on_meta)
    assert profiler.profile(spec, FAMILY, SHAPE).traced_by == "fake"


def test_a_model_that_no_way_serves_is_refused_with_the_first_reason(spec, monkeypatch):
    def fails(*args):
        raise NotImplementedError("no kernel for this")

    monkeypatch.setattr(profiler, "micro_step", fails)
    with pytest.raises(InputError, match="can't be traced, so there is no prediction: no kernel for this"):
        profiler.profile(spec, FAMILY, SHAPE)


def test_a_model_too_large_for_a_real_run_is_not_run(only):
    """Few layers of it have less than 2 GiB."""
    only("run")
    with pytest.raises(InputError, match="too much for a real run"):
        profiler.profile(resolve("meta-llama/Llama-3.2-1B"), FAMILY, Shape(task=Task.CAUSAL_LM, length=1024))
