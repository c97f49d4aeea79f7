"""Attention on a CUDA device: which kernel torch takes, and what each keeps and takes."""

import numpy as np
import pytest
import tapes
import torch
from tapes import live

from autotune.cost.attention import AttentionCall, attention, chosen
from autotune.cost.family import generation_of
from autotune.cost.profile import ACTIVATION, CONTRACTION, FUSED_ATTENTION
from autotune.cost.tape import Recorder, Tape

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 512, 64
ELEMENTS = BATCH * HEADS * LENGTH * WIDTH
SCORES = BATCH * HEADS * LENGTH * LENGTH


def part(heads: int = HEADS, dtype=torch.bfloat16, width: int = WIDTH, length: int = LENGTH) -> torch.Tensor:
    laid_out = torch.empty(BATCH, length, heads, width, device="meta", dtype=dtype)
    return laid_out.transpose(1, 2).requires_grad_()


def asked(dtype=torch.bfloat16, *, key_heads: int = HEADS, width: int = WIDTH, **more) -> AttentionCall:
    query, key, value = part(dtype=dtype, width=width), *(part(key_heads, dtype, width) for _ in range(2))
    return AttentionCall(query, key, value, enable_gqa=key_heads != HEADS, **more)


def mask(dtype=torch.bool, heads: int = 1, length: int = LENGTH) -> torch.Tensor:
    return torch.empty(BATCH, heads, length, length, device="meta", dtype=dtype)


def tape_of(what: AttentionCall, generation="ampere", context_parallel: int = 1) -> Tape:
    known = (t for t in what if isinstance(t, torch.Tensor))
    return tapes.tape_of(lambda recorder: attention(recorder, what, generation, context_parallel), *known)


def during_backward(tape: Tape) -> float:
    """Bytes alive while the kernel runs, output and its gradient included."""
    return float(live(tape)[next(i for i, n in enumerate(tape.names) if n.endswith("attention_backward"))].sum())


@pytest.mark.parametrize(
    ("capability", "what", "kernel"),
    [
        ((8, 0), {}, "flash"), ((7, 5), {"dtype": torch.float16}, "efficient"),
        ((7, 5), {}, "math"),  # bf16, which its tensor cores don't have
        ((8, 0), {"dtype": torch.float32}, "efficient"), ((8, 0), {"attn_mask": mask()}, "efficient"),
        ((8, 0), {"attn_mask": mask(torch.float32).mT}, "math"),  # keys apart, as T5's bias in transformers 5.17
        ((8, 0), {"key_heads": 1}, "flash"), ((8, 0), {"width": 256}, "flash"), ((8, 6), {"width": 224}, "efficient"),
        ((8, 6), {"width": 256}, "flash"), ((8, 6), {"width": 256, "dropout_p": 0.1}, "efficient"),
        ((8, 0), {"width": 264}, "efficient"),
        ((8, 0), {"dtype": torch.float32, "width": 66}, "math"),  # no multiple of four
        ((7, 5), {"dtype": torch.float32, "width": 66}, "efficient"), (None, {}, "flash"),
    ],
)  # fmt: skip
def test_the_kernel_that_torch_takes(capability, what, kernel):
    assert chosen(asked(**what), generation_of(capability)) == kernel


@pytest.mark.parametrize(("takes_groups", "kernel"), [(False, "math"), (True, "efficient")])
def test_grouped_keys_in_fp32_are_for_the_efficient_kernel_from_torch_2_14_on(monkeypatch, takes_groups, kernel):
    monkeypatch.setattr("autotune.cost.attention._EFFICIENT_TAKES_GROUPS", takes_groups)
    call = asked(torch.float32, key_heads=1)
    assert chosen(call, "ampere") == kernel
    if takes_groups:  # gradients of keys and values for all heads, before they are summed
        more = during_backward(tape_of(call)) - during_backward(tape_of(asked(torch.float32)))
        assert more == pytest.approx(2 * 4 * BATCH * WIDTH * LENGTH, rel=0.01)


@pytest.mark.parametrize(
    ("what", "generation"),
    [({}, None), *((what, "ampere") for what in ({}, {"dtype": torch.float32}, {"attn_mask": mask()}))],
)
def test_fused_kernels_keep_their_output_and_a_number_for_each_row(what, generation):
    call = asked(**what)
    tape = tape_of(call, generation)
    numbers = 0 if call.attn_mask is None else call.attn_mask.numel() * 2  # booleans become numbers
    element = call.query.element_size()
    assert live(tape)[tape.forward_end, ACTIVATION] == element * ELEMENTS + 4 * BATCH * HEADS * LENGTH + numbers


def test_work_is_two_products_forward_and_five_backward_and_half_of_it_under_a_causal_mask():
    whole, causal, on_cpu = tape_of(asked()), tape_of(asked(is_causal=True)), tape_of(asked(), None)
    product = 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH
    assert whole.flops[whole.kinds == FUSED_ATTENTION].tolist() == [2 * product, 5 * product]
    assert on_cpu.flops[on_cpu.kinds == CONTRACTION].tolist() == [2 * product, 5 * product]
    assert causal.flops.sum() == whole.flops.sum() / 2


def test_flash_takes_the_querys_gradient_in_fp32_and_those_of_all_heads_before_grouped_ones():
    """Beside output, its gradient and those of query, key and value, 2 bytes each."""
    rows = 2 * 4 * BATCH * HEADS * LENGTH  # log-sum-exp, and what the softmax needs
    grouped, equal = (during_backward(tape_of(asked(key_heads=heads))) for heads in (1, HEADS))
    assert equal == 4 * ELEMENTS + 5 * 2 * ELEMENTS + rows
    assert grouped - equal == 2 * 2 * ELEMENTS / HEADS


def test_the_efficient_kernel_sums_the_querys_gradient_up_in_fp32():
    """And multiplies output and gradient first where they are in fp32, which is over by then."""
    tape = tape_of(asked(torch.float32))
    tiles = 4 * BATCH * HEADS * LENGTH // 64 * (64 * 64 + 4)
    assert during_backward(tape) == 5 * 4 * ELEMENTS + tiles + 2 * 4 * BATCH * HEADS * LENGTH
    assert "mul" in tape.names


def test_where_heads_are_wider_than_a_tile_gradients_of_keys_and_values_are_summed_up_too():
    """The kernel that 8.6 has shared memory for: as many copies as the keys are split into."""
    big, small = (during_backward(tape_of(asked(attn_mask=mask(), width=128), g)) for g in ("ampere", "small_ampere"))
    splits, columns, tiles_more = 8, 64, 4 * (16 * (64 * 64 + 4) - 4 * (128 * 128 + 4))
    assert small - big == BATCH * HEADS * (4 * 2 * splits * columns * 128 + tiles_more)


def test_a_trained_mask_gets_a_gradient_for_every_sample_and_rows_of_no_multiple_of_eight_are_copied():
    bias = torch.empty(1, HEADS, LENGTH, LENGTH, device="meta", dtype=torch.bfloat16)
    fixed, trained = (during_backward(tape_of(asked(attn_mask=b))) for b in (bias, bias.clone().requires_grad_()))
    assert trained - fixed == 2 * SCORES

    def kept(length):
        query = part(length=length)
        tape = tape_of(AttentionCall(query, query, query, mask(torch.bfloat16, length=length)))
        return float(live(tape)[tape.forward_end - 1].sum())

    assert kept(508) - kept(512) > 0.9 * 2 * BATCH * 508 * 512


def test_math_attention_of_16_bits_keeps_scores_of_32_and_adds_its_mask_in_place(monkeypatch):
    monkeypatch.setattr("autotune.cost.attention._EFFICIENT_TAKES_GROUPS", False)
    calls = asked(attn_mask=mask(), key_heads=1), asked(torch.float32, key_heads=1, is_causal=True)
    assert [chosen(call, "ampere") for call in calls] == ["math", "math"]
    half, causal = map(tape_of, calls)
    assert live(half)[half.forward_end, ACTIVATION] > 4 * SCORES
    assert live(causal)[: causal.forward_end].sum(axis=1).max() < 3 * 4 * SCORES


@pytest.mark.parametrize("width", [60, WIDTH])  # filled up to a multiple of eight
@pytest.mark.parametrize("key_heads", [1, 2, HEADS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_and_gradients_have_the_shapes_of_their_inputs(dtype, key_heads, width):
    call = asked(dtype, key_heads=key_heads, width=width)
    output = attention(Recorder([]), call, "ampere")
    output.backward(torch.empty_like(output))
    assert output.shape == call.query.shape
    assert [t.grad.shape for t in call[:3]] == [t.shape for t in call[:3]]


def test_flash_lays_its_output_and_gradients_out_as_its_inputs_and_the_efficient_kernel_by_position():
    """So a query whose heads lie apart, as GPT-NeoX's, has its output copied to merge them."""
    for dtype, is_merged in ((torch.bfloat16, False), (torch.float32, True)):
        assert attention(Recorder([]), asked(dtype), "ampere").transpose(1, 2).is_contiguous()
        query, key, value = asked(dtype)[:3]
        query = torch.empty_like(query, memory_format=torch.contiguous_format).requires_grad_()
        output = attention(Recorder([]), AttentionCall(query, key, value), "ampere")
        gradients = torch.autograd.grad(output, (query, key), torch.empty_like(output))
        assert [t.transpose(1, 2).is_contiguous() for t in (output, *gradients)] == [is_merged, is_merged, True]


@pytest.mark.parametrize("devices", [2, 4])
def test_a_ring_attends_to_the_keys_of_all_devices_and_keeps_no_more_than_its_own(devices):
    alone, ring = (tape_of(asked(is_causal=True), context_parallel=n) for n in (1, devices))
    forward = np.arange(len(ring.names)) < ring.forward_end
    # Its own keys by a causal mask; of each other device half of the rows to all keys, or all rows to half of them.
    assert ring.flops[forward & (ring.kinds == FUSED_ATTENTION)].tolist() == [2.0 * ELEMENTS * LENGTH] * devices
    kept = [live(tape)[tape.forward_end - 1][ACTIVATION].sum() for tape in (alone, ring)]
    assert kept[1] == kept[0]  # an output and its log-sum-exp
    assert during_backward(ring) > during_backward(alone) + 2 * ELEMENTS * devices * 2  # gathered keys and values


def test_a_ring_goes_around_flash_attention_alone():
    with pytest.raises(NotImplementedError, match="ring around this kernel isn't known"):
        tape_of(asked(dtype=torch.float32), context_parallel=2)
