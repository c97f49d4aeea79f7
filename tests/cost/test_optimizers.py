"""The table of optimizers, held against real steps: what they keep, and what a step takes beside it."""

import itertools
from collections.abc import Callable
from functools import partial

import bitsandbytes
import pytest
import torch
from factories import make_config
from profiles import MB, ONE_DEVICE, make_group, make_profile, make_storages
from torch.profiler import ProfilerActivity
from transformers.optimization import Adafactor

from autotune.cost.memory import components, states_bytes
from autotune.cost.optimizers import OPTIMIZERS as ROWS
from autotune.cost.optimizers import optimizer
from autotune.cost.sharding import share_of
from autotune.training.build import build_model
from autotune.training.resolve import resolve
from autotune.values.model import Task
from autotune.values.techniques import OPTIMIZERS

SHAPES = ((300, 200), (300, 200), (200, 100), (70,))

# As the Trainer makes them.
ON_A_CPU = {
    "adamw_torch": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw_torch_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, foreach=False),
    "adafactor": lambda p: Adafactor(p, lr=1e-3, scale_parameter=False, relative_step=False),
    "adamw_bnb_8bit": lambda p: bitsandbytes.optim.AdamW(p, optim_bits=8),
    "lion_32bit": lambda p: bitsandbytes.optim.Lion(p, optim_bits=32),
    "lion_8bit": lambda p: bitsandbytes.optim.Lion(p, optim_bits=8),
    "rmsprop_bnb": lambda p: bitsandbytes.optim.RMSprop(p, optim_bits=32),
    "rmsprop_bnb_8bit": lambda p: bitsandbytes.optim.RMSprop(p, optim_bits=8),
    "ademamix": lambda p: bitsandbytes.optim.AdEMAMix(p, optim_bits=32),
    "ademamix_8bit": lambda p: bitsandbytes.optim.AdEMAMix(p, optim_bits=8),
}

# Made for a GPU: foreach takes the same lists of tensors on a CPU, if it is asked to.
AS_ON_A_GPU = {
    "adamw_torch": lambda p: torch.optim.AdamW(p, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, foreach=True),
}


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    """bitsandbytes remembers by `id` which weights the Trainer of an earlier test kept in 32 bits."""
    monkeypatch.setattr(bitsandbytes.optim.GlobalOptimManager, "_instance", None)


def stepped(make: Callable, shapes=SHAPES, dtype=torch.float32) -> torch.optim.Optimizer:
    """An optimizer after its first step."""
    weights = [torch.nn.Parameter(torch.randn(*shape).to(dtype)) for shape in shapes]
    made = make(weights)
    if hasattr(made, "train"):  # schedulefree
        made.train()
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    made.step()
    return made


def kept_bytes(made: torch.optim.Optimizer) -> int:
    """Bytes of the states; numbers of steps and the tables of values of each code are left out."""
    states = itertools.chain.from_iterable(state.items() for state in made.state.values())
    tensors = [t for name, t in states if isinstance(t, torch.Tensor) and t.dim() and not name.startswith("qmap")]
    parts = [[t.codes, t.scale] if hasattr(t, "codes") else [t] for t in tensors]  # torchao's packed tensors
    return sum(t.numel() * t.element_size() for t in itertools.chain.from_iterable(parts))


def taken_bytes(made: torch.optim.Optimizer) -> int:
    """The most that torch's allocator has given out at any time of a step, beyond what there was before."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made.step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return max(itertools.accumulate((e.nbytes() for e in events), initial=0))


def groups_of(shapes=SHAPES, element_bytes: int = 4, **fields) -> list:
    return [make_group(*s, count=shapes.count(s), element_bytes=element_bytes, **fields) for s in dict.fromkeys(shapes)]


def test_every_optimizer_that_can_run_has_a_row_which_knows_of_updates_in_the_backward_pass():
    runnable = {name: facts for name, facts in OPTIMIZERS.items() if facts.unusable is None}
    in_backward = {n: row.in_backward > 0 for n, row in ROWS.items()}
    assert in_backward == {n: f.updates_in_backward for n, f in runnable.items()}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:CUDA is not available")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["adamw_torch_4bit", "adamw_torch_8bit", "grokadamw", "schedule_free_adamw", "schedule_free_sgd", "stable_adamw"],
)
def test_states_are_those_of_packages_where_these_are_installed(name, dtype, monkeypatch):
    """Of 96,000 elements, blocks of 128 or 256 of which fill some weights and not others, as embeddings or not."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao compiles its step
    module, _, kind = OPTIMIZERS[name].class_name.rpartition(".")
    made = stepped(partial(getattr(pytest.importorskip(module), kind), lr=1e-3), dtype=dtype)
    if name == "grokadamw":  # it keeps its states in its groups of parameters
        made.state = made.param_groups[0]["state"]
    assert optimizer(name).state_bytes(groups_of(element_bytes=dtype.itemsize)) == (kept_bytes(made), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ON_A_CPU)
def test_states_are_those_after_a_real_step(name, dtype):
    made = stepped(ON_A_CPU[name], dtype=dtype)
    assert optimizer(name).state_bytes(groups_of(element_bytes=dtype.itemsize)) == (kept_bytes(made), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adamw_bnb_8bit", "lion_32bit"]
)
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_a_step_on_a_cpu_takes_the_memory_of_a_real_one(name, dtype):
    expected = optimizer(name).temporary_bytes(groups_of(element_bytes=dtype.itemsize), None)
    assert taken_bytes(stepped(ON_A_CPU[name], dtype=dtype)) == pytest.approx(expected, abs=100)


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad", "lion_32bit"])
def test_the_step_of_a_single_weight_takes_no_more_than_is_said(name):
    """A loop over several still holds what the one before made."""
    expected = optimizer(name).temporary_bytes(groups_of(SHAPES[:1]), None)
    assert taken_bytes(stepped(ON_A_CPU[name], SHAPES[:1])) <= expected + 100


@pytest.mark.parametrize("name", AS_ON_A_GPU)
def test_a_step_on_a_gpu_takes_as_many_copies_as_foreach_makes_and_nothing_in_fused_kernels(name):
    expected = optimizer(name).temporary_bytes(groups_of(), "ampere")
    assert taken_bytes(stepped(AS_ON_A_GPU[name])) == pytest.approx(expected, abs=100)
    for fused in ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_32bit"):
        assert optimizer(fused).temporary_bytes(groups_of(), "ampere") == 0


@pytest.mark.parametrize(
    ("name", "elements", "states"),
    [
        ("adamw_8bit", 4095, (2 * 4 * 4095, 0)),  # small weights keep states in fp32
        ("adamw_8bit", 4096, (2 * (4096 + 4 * 16), 0)),
        ("paged_adamw_8bit", 256_000, (2 * 4_000, 2 * 256_000)),  # scales, of 256 elements each, stay on the device
        ("paged_adamw_32bit", 99_999, (8 * 99_999, 0)),  # `get_state_buffer` pages from 100,000 elements on
        ("paged_adamw_32bit", 100_000, (0, 800_000)),
    ],
)
def test_states_of_bitsandbytes_go_by_the_size_of_a_weight(name, elements, states):
    assert optimizer(name).state_bytes([make_group(elements)]) == states


def test_embeddings_keep_states_in_fp32_under_8_bit_optimizers():
    """The Trainer tells bitsandbytes so."""
    table = torch.nn.Embedding(300, 200)
    bitsandbytes.optim.GlobalOptimManager.get_instance().register_module_override(table, "weight", {"optim_bits": 32})
    made = bitsandbytes.optim.AdamW(table.parameters(), optim_bits=8)
    table.weight.grad = torch.zeros_like(table.weight)
    made.step()
    assert optimizer("adamw_bnb_8bit").state_bytes([make_group(300, 200, embedding=True)]) == (kept_bytes(made), 0)


def test_frozen_weights_cost_an_optimizer_nothing():
    frozen = groups_of(trained=False)
    assert optimizer("adamw_torch").state_bytes(frozen) == (0, 0)
    assert [optimizer("adamw_torch").temporary_bytes(frozen, gpu) for gpu in ("ampere", None)] == [0, 0]


def test_states_of_t5_3b():
    """AdamW 8 bytes a parameter; in 8 bits 2, but for its embeddings; Adafactor's rows and columns next to nothing."""
    model = build_model(resolve("t5-3b"), Task.SEQ2SEQ_LM, dtype="float32", attn_implementation=None, device="meta")
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    groups = [make_group(*p.shape, embedding=id(p) in tables) for p in model.parameters()]
    parameters = sum(g.elements for g in groups)
    assert parameters == 2_851_598_336
    wide, in_8_bits, factored = (
        optimizer(n).state_bytes(groups) for n in ("adamw_torch", "adamw_bnb_8bit", "adafactor")
    )
    assert wide == (22_812_786_688, 0)
    assert in_8_bits[0] / parameters == pytest.approx(2.1, abs=0.1)
    assert factored[0] / parameters < 0.02


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_states_of_low_rank_are_those_of_the_real_classes():
    """GaLore's and APOLLO's, of rank 128 as by the Trainer's default; vectors have whole ones."""
    apollo = pytest.importorskip("apollo_torch")
    galore = pytest.importorskip("galore_torch")
    low = {"rank": 128, "update_proj_gap": 200, "scale": 1.0, "proj_type": "std"}
    for name, kind, more in (
        ("apollo_adamw", apollo.APOLLOAdamW, {"proj": "random", "scale_type": "channel"}),
        ("galore_adamw", galore.GaLoreAdamW, {}),
    ):
        matrix, vector = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((300, 200), (200,)))
        made = kind([{"params": [vector]}, {"params": [matrix], **low, **more}])
        for weight in (matrix, vector):
            weight.grad = torch.randn_like(weight)
        made.step()
        projection = made.state[matrix]["projector"].ortho_matrix
        kept = kept_bytes(made) + projection.untyped_storage().nbytes()
        assert optimizer(name).state_bytes(groups_of(((300, 200), (200,))))[0] == pytest.approx(kept, rel=0.001)


@pytest.mark.parametrize("name", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_gradients_that_are_freed_in_the_backward_pass_are_never_there_all_at_once(name, accumulation):
    matrices = make_group(1000, 1000, count=50)
    model = make_profile(parameters=(matrices,), storages=make_storages((2, 3, 200 * MB, 0, True)))
    share = share_of(model, name, ONE_DEVICE, accumulated=accumulation > 1)
    held = components(model, share, 1, accumulation)
    assert held.gradients <= 2 * 4 * MB
    assert held.temporaries <= 3 * 4 * MB


def test_adalomo_of_a_7b_model_in_pure_bf16_is_not_refused_on_24_gb():
    """arXiv:2310.10195 is for it: 13.5 GB of weights, next to no states, a few gradients at a time."""
    assert states_bytes(6_738_415_616, make_config(precision="pure_bf16", optim="adalomo")) < 14e9


@pytest.mark.parametrize(
    ("rows", "taken"),
    [
        (30522, 4 * 30522 * 512 + (108 << 20)),  # BERT's vocabulary: a copy, and the scratch of a mean over the rows
        (128, 2 * 4 * 128 * 512),  # few rows: the squared gradient, and that plus epsilon
    ],
)
def test_adafactors_mean_over_the_rows_of_a_large_matrix_takes_more_than_its_copies(rows, taken):
    weight = [make_group(rows, 512)]
    assert optimizer("adafactor").temporary_bytes(weight, "ampere") == taken
    assert optimizer("adafactor").temporary_bytes(weight, None) == 2 * 4 * rows * 512
