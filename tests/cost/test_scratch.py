"""What operators take of a CUDA device and give back."""

import torch

from autotune.cost.scratch import scratch_bytes
from autotune.cost.tape import Recorder

KIB = 1024


def taken(compute, *known: torch.Tensor, name: str) -> float:
    """Bytes that are alive during an operator on CUDA beyond those on a CPU."""
    found = []
    for scratch in (scratch_bytes, None):
        recorder = Recorder(list(known), scratch)
        with recorder:
            result = compute()
            recorder.end_of_forward()
            result.backward(torch.empty_like(result))
            del result
        for tensor in known:
            tensor.grad = None
        tape = recorder.tape()
        found.append(float(tape.live[tape.names.index(name)].sum()))
    return found[0] - found[1]


def test_softmax_multiplies_its_output_and_gradient_first():
    scores = torch.empty(4 * KIB, KIB, device="meta", requires_grad=True)
    assert taken(lambda: scores.softmax(-1), scores, name="_softmax_backward_data") == 4 * scores.numel()
    assert taken(lambda: scores.log_softmax(-1), scores, name="_log_softmax_backward_data") == 0


def test_embeddings_sum_up_gradients_by_token_and_by_ten_tokens():
    """Seen on torch's allocator: 36,909,056 bytes of partial sums for 8,192 tokens of 1,024 numbers."""
    table = torch.empty(30_000, 1024, device="meta", requires_grad=True)
    tokens = torch.empty(8192, dtype=torch.long, device="meta")
    found = taken(lambda: torch.nn.functional.embedding(tokens, table), table, name="embedding_dense_backward")
    assert 36_909_056 <= found <= 36_909_056 + 8 * 6.2 * 8192


def test_a_small_table_has_as_many_sums_as_rows():
    table = torch.empty(500, 1024, device="meta", requires_grad=True)
    tokens = torch.empty(8192, dtype=torch.long, device="meta")
    found = taken(lambda: torch.nn.functional.embedding(tokens, table), table, name="embedding_dense_backward")
    assert 5_402_624 <= found <= 5_402_624 + 8 * 6.2 * 8192
