"""Tables of techniques: kinds of checkpointing and what transformers is told of them, backends of torch.compile."""

import pytest

from autotune.values.techniques import BACKENDS, CHECKPOINTING, RENAMED, Mode, checkpointing_arguments, checkpointing_of

NEW, OLD = (5, 23), (5, 17)


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_a_kind_is_recognised_by_its_own_arguments(kind):
    assert checkpointing_of(checkpointing_arguments(kind, NEW)["activation_checkpointing_kwargs"]) == kind


def test_older_versions_have_the_older_name():
    assert checkpointing_arguments("none", OLD) == {"gradient_checkpointing": False}
    assert checkpointing_arguments("full", OLD)["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert checkpointing_arguments("none", NEW) == {"activation_checkpointing": False}


def test_no_options_are_those_of_the_library():
    assert checkpointing_of({}) == "full"


@pytest.mark.parametrize("options", [{"every_n_layers": 3}, {"preserve_rng_state": False}])
def test_options_of_no_kind_are_refused(options):
    with pytest.raises(ValueError, match="none of full, every-2nd"):
        checkpointing_of(options)


@pytest.mark.parametrize("kind", [k for k in CHECKPOINTING if not CHECKPOINTING[k].offload])
def test_the_installed_trainer_checkpoints_the_layers_of_a_kind(kind, tmp_path):
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    row, installed = CHECKPOINTING[kind], tuple(int(part) for part in transformers.__version__.split(".")[:2])
    made = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **checkpointing_arguments(kind, installed))
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=8, num_attention_heads=1)
    model = LlamaForCausalLM(config)
    name = "activation_checkpointing" if installed >= RENAMED else "gradient_checkpointing"
    options = dict(getattr(made, f"{name}_kwargs"))
    own = {key: options.pop(key) for key in ("every_n_layers", "offload") if key in options}
    getattr(model, f"{name}_enable")(options, **own)
    assert sum(layer.gradient_checkpointing for layer in model.model.layers) == 8 // row.every


def test_modes_are_inductors():
    import typing

    from torch._inductor import list_mode_options

    assert set(typing.get_args(Mode)) <= set(list_mode_options())


def test_what_trains_is_known_to_torch():
    import torch

    known = torch._dynamo.list_backends(exclude_tags=())
    assert set(BACKENDS) <= set(known)
