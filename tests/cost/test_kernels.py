"""Kernels of a GPU: what they keep, what their backward pass takes, and what work they are."""

import pytest
import torch
from tapes import live, tape_of

from autotune.cost.attention import flash
from autotune.cost.kernels import GroupedMatmul, UpcastSoftmax, flash_attention_2, scratch_bytes
from autotune.cost.tape import Recorder

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 64, 16
ELEMENTS = BATCH * HEADS * LENGTH * WIDTH
WORKSPACE = 8_519_680  # of cuBLAS, before Hopper


def test_flash_attention_can_be_asked_for_while_it_is_let():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    asked = {"attention_mask": None, "is_causal": True}
    query = torch.ones(BATCH, HEADS, LENGTH, WIDTH, device="meta", requires_grad=True)
    with flash_attention_2(Recorder([]), torch.bfloat16):
        run = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
        output, weights = run(torch.nn.Module(), query, query, query, **asked)
    assert output.dtype is torch.bfloat16
    assert output.shape == (BATCH, LENGTH, HEADS, WIDTH)
    assert weights is None
    assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"] is not run


def test_flash_attention_of_padded_batches_keeps_the_copies_of_transformers():
    """The rows of query, key, value and output, and where they are, beside the output with its padding."""
    from transformers import modeling_flash_attention_utils as theirs
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)

    def unpadded(query, key, value):
        laid = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        *rows, indices, _, _ = theirs._upad_input(*laid, mask, LENGTH, theirs._unpad_input)
        parts = (row.unflatten(0, (BATCH, LENGTH)).transpose(1, 2) for row in rows)
        output = flash(Recorder([]), *parts, causal=True).transpose(1, 2).flatten(0, 1)
        return theirs._pad_input(output, indices, BATCH, LENGTH)

    def kept(run):
        query = torch.ones(BATCH, HEADS, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        found = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: found.update({t.data_ptr(): t.nbytes}) or t, lambda t: t
        ):
            output = run(*(query * 1 for _ in range(3)))
        assert output.shape == (BATCH, LENGTH, HEADS, WIDTH)
        return sum(found.values()) + output.nbytes

    with flash_attention_2(Recorder([]), torch.bfloat16):
        run = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
        asked = {"attention_mask": mask, "is_causal": True}
        assert kept(lambda *tensors: run(torch.nn.Module(), *tensors, **asked)[0]) == kept(unpadded)
        asked["attention_mask"] = None
        assert kept(lambda *tensors: run(torch.nn.Module(), *tensors, **asked)[0]) < kept(unpadded)


@pytest.mark.parametrize("is_log", [False, True])
def test_softmax_that_reads_16_bits_and_writes_32_keeps_its_output(is_log):
    """Its backward pass multiplies it with its gradient first, that of the logarithm doesn't."""
    scores = torch.ones(1024, device="meta", dtype=torch.float16, requires_grad=True)
    tape = tape_of(lambda recorder: UpcastSoftmax.apply(scores, recorder, is_log), scores)
    assert live(tape)[tape.forward_end - 1].sum() == 4 * 1024
    assert scores.grad.dtype is torch.float16
    backward = live(tape)[tape.names.index("softmax_backward")].sum()
    assert backward == (4 + 4 + 2 + (0 if is_log else 4)) * 1024


@pytest.mark.parametrize("frozen", [False, True])
def test_a_grouped_product_makes_only_the_gradients_that_are_needed(frozen):
    rows = torch.ones(64, 16, device="meta", requires_grad=True)
    matrices = torch.ones(4, 16, 8, device="meta", requires_grad=not frozen)
    tape = tape_of(lambda recorder: GroupedMatmul.apply(rows, matrices, recorder), rows, matrices)
    assert tape.flops.sum() == (2 if frozen else 3) * 2 * 64 * 16 * 8
    assert rows.grad.shape == rows.shape
    assert (matrices.grad is None) == frozen


def taken(compute, known: torch.Tensor, name: str) -> float:
    """Bytes that are alive during an operator on CUDA beyond those on a CPU."""
    tapes = [tape_of(lambda _: compute(), known, scratch=scratch) for scratch in (scratch_bytes, None)]
    on_cuda, on_cpu = (float(live(tape)[tape.names.index(name)].sum()) for tape in tapes)
    return on_cuda - on_cpu


def test_from_torch_2_15_on_a_product_takes_a_workspace_and_gives_it_back(monkeypatch, profile_of):
    """As torch 2.15.0 does on the stand-in for CUDA."""
    matrix = torch.empty(64, 64, device="meta", requires_grad=True)
    for keeps in (True, False):
        monkeypatch.setattr("autotune.cost.kernels.KEEPS_WORKSPACES", keeps)
        for compute, name, workspace in (
            (lambda: matrix @ matrix, "mm", WORKSPACE),
            (lambda: matrix[None] @ matrix[None], "bmm", WORKSPACE),
            (lambda: torch.addmm(matrix, matrix, matrix), "addmm", WORKSPACE),
            (lambda: torch.addmm(matrix[0], matrix, matrix), "addmm", 1 << 20),
            (lambda: torch.addmm(*[matrix.bfloat16()] * 3), "addmm", 1 << 20),
        ):
            assert taken(compute, matrix, name) == (0 if keeps else workspace)
    storages = profile_of("llama", device="cuda", dtype="float16", generation="hopper").storages
    assert storages.workspaces == ()
    assert 32 << 20 in storages.rows[:, 2]


def test_softmax_multiplies_its_output_and_gradient_first():
    scores = torch.empty(4096, 1024, device="meta", requires_grad=True)
    assert taken(lambda: scores.softmax(-1), scores, "_softmax_backward_data") == 4 * scores.numel()
    assert taken(lambda: scores.log_softmax(-1), scores, "_log_softmax_backward_data") == 0


def test_softmax_and_layer_norm_copy_what_is_not_contiguous_first():
    rows = torch.empty(1024, 4096, device="meta", requires_grad=True)
    for name, compute in {
        "_softmax": lambda t: t.softmax(-1),
        "native_layer_norm": lambda t: torch.nn.functional.layer_norm(t, t.shape[-1:]),
    }.items():
        assert taken(lambda compute=compute: compute(rows.t()), rows, name) == 4 * rows.numel()
        assert taken(lambda compute=compute: compute(rows), rows, name) == 0


@pytest.mark.parametrize(("rows", "sums"), [(30_000, 36_909_056), (500, 5_402_624)])
def test_embeddings_sum_up_gradients_by_token_and_by_ten_tokens_and_small_tables_by_row(rows, sums):
    """Seen on torch's allocator: bytes of partial sums for 8,192 tokens of 1,024 numbers."""
    table = torch.empty(rows, 1024, device="meta", requires_grad=True)
    tokens = torch.empty(8192, dtype=torch.long, device="meta")
    found = taken(lambda: torch.nn.functional.embedding(tokens, table), table, "embedding_dense_backward")
    assert sums <= found <= sums + 8 * 6.2 * 8192
