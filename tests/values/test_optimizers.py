"""The table of optimizers is that of the installed transformers, and says truly what runs."""

import pytest
from transformers.training_args import OptimizerNames

from autotune.values.hardware import installed_versions
from autotune.values.optimizers import OPTIMIZERS, PACKAGES, SUCCESSORS

# Packages whose optimizers have groups of their own, or need a GPU.
UNLIKE = {"apollo-torch", "galore-torch", "lomo-optim"}
HERE = installed_versions().keys() - UNLIKE
RUN_HERE = sorted(
    name
    for name, row in OPTIMIZERS.items()
    if row.unusable is None and (row.package is None or row.package in HERE) and not row.compiles
)


def test_every_optimizer_of_the_installed_transformers_has_a_row_and_no_other():
    assert {str(name.value) for name in OptimizerNames} == OPTIMIZERS.keys()


def test_removed_names_are_gone_and_their_successors_are_there():
    assert not SUCCESSORS.keys() & OPTIMIZERS.keys()
    assert set(SUCCESSORS.values()) <= OPTIMIZERS.keys()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_row_says_what_runs_or_why_nothing_does(name):
    row = OPTIMIZERS[name]
    assert bool(row.class_name) != bool(row.unusable)
    assert row.package is None or row.package in PACKAGES


@pytest.mark.parametrize("name", RUN_HERE)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_the_trainer_makes_the_class_of_the_row(name, tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    arguments = TrainingArguments(str(tmp_path), optim=name, use_cpu=True, report_to="none", weight_decay=0.1)
    optimizer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=[{}]).create_optimizer()
    assert f"{type(optimizer).__module__}.{type(optimizer).__name__}" == OPTIMIZERS[name].class_name
    decayed, kept = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    assert all(p.dim() == 1 for p in kept["params"])
    assert all(p.dim() > 1 for p in decayed["params"])
    assert isinstance(decayed["params"][0], torch.nn.Parameter)


@pytest.mark.cuda
def test_an_optimizer_takes_gradients_in_bf16_where_bitsandbytes_has_a_kernel_for_them():
    """Of each optimizer: fp32, fp16 and, of some, bf16. Small weights have states in 32 bits always."""
    kernels = pytest.importorskip("bitsandbytes.backends.cuda.ops").str2optimizer32bit
    for name, row in OPTIMIZERS.items():
        if row.package == "bitsandbytes" and row.unusable is None:
            kind = row.class_name.rpartition(".")[2].lower().replace("adamw", "adam")
            assert row.takes_bf16 == (len(kernels[kind]) == 3), name
