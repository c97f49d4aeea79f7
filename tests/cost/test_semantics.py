"""A trace runs what the real device would: autocast, fused attention, dropout; and answers questions about data."""

import numpy as np
import pytest
import torch
from tapes import live
from torch.nn import functional

from autotune.cost.semantics import Semantics
from autotune.cost.tape import Recorder, Tape

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


def meta(*shape: int, dtype=FP32, trained: bool = False) -> torch.Tensor:
    return torch.ones(shape, device="meta", dtype=dtype, requires_grad=trained)


def run(compute, device="cuda", *, autocast=BF16, known=(), **options):
    """What `compute` returns when the device runs it, with the tape of its forward pass."""
    marker = meta(1)
    recorder = Recorder([*known, marker])
    semantics = Semantics(device, recorder, autocast=autocast, **options)
    with recorder, semantics:
        with semantics.casting():
            result = compute()
        recorder.note_kernel("after the forward pass", 0.0, marker)
        recorder.end_of_forward()
    return result, recorder.tape()


def tape_of(*arguments, **options) -> Tape:
    return run(*arguments, **options)[1]


def test_views_of_weights_are_cast_each_time_as_in_an_autograd_function_of_a_library():
    """There a view of a weight is a leaf that asks for gradients: `cached_cast` of torch's autocast passes over it."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, weight):
            columns = weight.t()
            return rows @ columns + rows @ columns

    weight = meta(8, 8, trained=True)
    tape = tape_of(lambda: Twice.apply(meta(8, 8, dtype=BF16), weight), known=[weight])
    assert tape.names.count("_to_copy") == 2


@pytest.mark.parametrize("needs_shares", [False, True])
def test_torchs_own_multi_head_attention_runs_as_its_operators_do(needs_shares):
    """As in WavLM, and in the pooling head of SigLIP: products in 16 bits, dropout with a mask of bytes."""
    attention = torch.nn.MultiheadAttention(8, 2, dropout=0.1, device="meta")
    tokens = meta(4, 3, 8)
    (output, _), tape = run(
        lambda: attention(tokens, tokens, tokens, need_weights=needs_shares), known=list(attention.parameters())
    )
    assert output.dtype is BF16
    assert ("flash_attention" in tape.names) != needs_shares
    assert ("native_dropout" in tape.names) == needs_shares


# What is computed of 32 bits and of 16, and the types of the result on the CPU and on CUDA.
AUTOCAST = {
    "linear": (lambda x, h: functional.linear(x, x), BF16, BF16),
    "matmul": (lambda x, h: x @ x, BF16, BF16),
    "matmul of mixed types": (lambda x, h: x @ h, BF16, BF16),
    "einsum": (lambda x, h: torch.einsum("ij,jk->ik", x, x), BF16, BF16),
    "conv": (lambda x, h: functional.conv1d(x[None], x[:, :, None]), BF16, BF16),
    "gelu": (lambda x, h: functional.gelu(h), BF16, BF16),
    "mean": (lambda x, h: h.mean(), BF16, BF16),
    "sum of mixed types": (lambda x, h: x + h, FP32, FP32),
    "mse loss": (lambda x, h: functional.mse_loss(h, h), FP32, FP32),
    "cross entropy": (lambda x, h: functional.cross_entropy(h, h[0].new_zeros(8, dtype=torch.long)), FP32, FP32),
    "softmax": (lambda x, h: h.softmax(-1), BF16, FP32),
    "log softmax": (lambda x, h: functional.log_softmax(h, -1), BF16, FP32),
    "layer norm": (lambda x, h: functional.layer_norm(h, (8,)), BF16, FP32),
    "group norm": (lambda x, h: functional.group_norm(h, 2), BF16, FP32),
    "exp": (lambda x, h: h.exp(), BF16, FP32),
    "power": (lambda x, h: h**2, BF16, FP32),
    "square": (lambda x, h: h.square(), BF16, FP32),
    "rsqrt": (lambda x, h: h.rsqrt(), BF16, FP32),
    "norm": (lambda x, h: h.norm(), BF16, FP32),
    "logsumexp": (lambda x, h: h.logsumexp(-1), BF16, FP32),
    "softplus": (lambda x, h: functional.softplus(h), BF16, FP32),
    "cumsum": (lambda x, h: h.cumsum(-1), BF16, FP32),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_computes_in_the_type_of_its_lists(name):
    """torch/include/ATen/autocast_mode.h for CUDA, on the CPU torch itself."""
    compute, *expected = AUTOCAST[name]
    traced = [run(lambda: compute(meta(8, 8), meta(8, 8, dtype=BF16)), device)[0] for device in ("cpu", "cuda")]
    assert [result.dtype for result in traced] == expected
    with torch.autocast("cpu", dtype=BF16):
        assert compute(torch.ones(8, 8), torch.ones(8, 8, dtype=BF16)).dtype is expected[0]


def test_a_weight_is_cast_once_other_tensors_each_time_and_nothing_without_autocast():
    weight, hidden, wide = meta(8, 8, trained=True), meta(4, 8, dtype=BF16), meta(8, 8)
    once = tape_of(lambda: functional.linear(functional.linear(hidden, weight), weight), known=[weight, hidden])
    each = tape_of(lambda: (wide @ wide, wide @ wide), known=[wide])
    assert [tape.names.count("_to_copy") for tape in (once, each)] == [1, 4]
    result, plain = run(lambda: hidden @ meta(8, 8, dtype=BF16), autocast=None)
    assert result.dtype is BF16
    assert "_to_copy" not in plain.names


def test_a_cast_weight_is_kept_until_the_end_of_the_forward_pass():
    weight, hidden = meta(100, 100, trained=True), meta(1, 100, dtype=BF16)

    def compute():
        functional.linear(hidden, weight)  # nobody holds the result, nor anything for a backward pass
        return hidden + 1

    tape = tape_of(compute, known=[weight, hidden])
    last, after = tape.names.index("add"), tape.names.index("after the forward pass")
    assert live(tape)[last].sum() >= 2 * 100 * 100
    assert live(tape)[after].sum() < 2 * 100 * 100


def test_a_forward_pass_that_runs_again_casts_again():
    """The cache is empty by then."""
    weight, hidden = meta(8, 8, trained=True), meta(4, 8, dtype=BF16)
    recorder = Recorder([weight, hidden])
    semantics = Semantics("cuda", recorder, autocast=BF16)
    with recorder, semantics:
        for how in (semantics.casting, semantics.again):
            with how():
                functional.linear(hidden, weight)
    tape = recorder.tape()
    assert tape.names.count("_to_copy") == 2
    assert tape.recomputed.tolist() == np.repeat([False, True], len(tape.names) // 2).tolist()


@pytest.mark.parametrize("autocast", [FP16, BF16])
def test_softmax_in_fp32_converts_bf16_first_and_reads_fp16_as_it_is(autocast):
    """aten/src/ATen/native/SoftMax.cpp: only Half is fused."""
    scores = meta(100, 100, dtype=autocast)
    tape = tape_of(lambda: scores.softmax(-1), autocast=autocast, known=[scores])
    copies = 2 if autocast is BF16 else 1  # the converted one and the result
    assert live(tape).sum(axis=1).max() == copies * 4 * 100 * 100


@pytest.mark.parametrize(
    ("device", "rate", "training", "mask"),
    [("cuda", 0.1, True, 1), ("cpu", 0.1, True, 4), ("cuda", 0.0, True, 0), ("cuda", 0.1, False, 0)],
)
def test_dropout_keeps_a_mask_of_bytes_on_cuda_and_on_the_cpu_one_as_wide_as_the_values(device, rate, training, mask):
    hidden = meta(1000, trained=True)
    tape = tape_of(lambda: functional.dropout(hidden * 2, rate, training), device, autocast=None, known=[hidden])
    assert live(tape)[-1].sum() == (4 + mask) * 1000


BATCH, HEADS, LENGTH, WIDTH = 2, 4, 256, 16
SCORES = BATCH * HEADS * LENGTH * LENGTH


@pytest.mark.parametrize(
    ("device", "options", "keeps"),
    [
        ("cuda", {}, False), ("cuda", {"dropout_p": 0.1}, False), ("cpu", {}, False),
        # torch's CPU kernel has no dropout, wants one width (DeepSeek's values are narrower) and trains no bias
        ("cpu", {"dropout_p": 0.1}, True), ("cpu", {"values": WIDTH // 2}, True),
        ("cpu", {"attn_mask": meta(1, HEADS, LENGTH, LENGTH, trained=True)}, True),
        ("cpu", {"attn_mask": meta(1, HEADS, LENGTH, LENGTH)}, False),
    ],
    ids=["on cuda", "dropped on cuda", "on a cpu", "dropped", "narrow values", "a trained bias", "a bias"],
)  # fmt: skip
def test_fused_attention_keeps_no_scores(device, options, keeps):
    widths = (WIDTH, WIDTH, options.get("values", WIDTH))
    parts = [meta(BATCH, HEADS, LENGTH, width, trained=True) for width in widths]
    given = {name: value for name, value in options.items() if name != "values"}
    tape = tape_of(lambda: functional.scaled_dot_product_attention(*parts, **given), device, autocast=None, known=parts)
    assert (live(tape).sum(axis=1).max() >= 4 * SCORES) == keeps


MASK = meta(2, 8)
ANSWERS = {
    "without padding every mask is true": (lambda: bool((MASK == 1).all()), {}, True),
    "and none is false": (lambda: bool((MASK == 0).any()), {}, False),
    "a value is asked for": (lambda: bool(MASK[0, 0] == 1), {}, True),
    "with padding not all of a mask is true": (lambda: bool((MASK == 1).all()), {"padded": True}, False),
    "tokens are shared out evenly between experts": (
        lambda: tuple((meta(4, 32, 2)[0] == 1).nonzero().shape), {"experts": 4}, (32 * 2 // 4, 2)
    ),
    "every expert is chosen": (lambda: (meta(4) > 0).nonzero().tolist(), {"experts": 4}, [[0], [1], [2], [3]]),
    "positions that are looked for are all found": (lambda: list(map(len, torch.where(meta(3, 5) > 0))), {}, [15, 15]),
    "a choice between two tensors is no question": (
        lambda: torch.where(meta(3, 5) > 0, meta(3, 5), meta(3, 5)).shape, {}, (3, 5)
    ),
    "what is no meta tensor is computed": (lambda: bool((torch.zeros(3) == 1).any()), {}, False),
    "positions as well": (lambda: torch.tensor([0, 1]).nonzero().tolist(), {"experts": 4}, [[1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_questions_about_data_are_answered(name):
    compute, options, answer = ANSWERS[name]
    assert run(compute, **options)[0] == answer
