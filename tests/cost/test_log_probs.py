"""The head of log-probabilities, traced, takes what TRL's own takes on the CPU."""

import pytest
import torch

from autotune.cost.log_probs import log_probs_head
from autotune.cost.profile import CONTRACTION
from autotune.cost.tape import Recorder
from autotune.training.build import build_model
from autotune.values.model import Task

ROWS, LENGTH = 4, 32


def taped(model, head):
    """Return the tape of a forward and backward pass of a model with a head, and the floating-point operations."""
    ids = torch.zeros((ROWS, LENGTH), dtype=torch.long, device=model.device)
    recorder = Recorder([*model.parameters(), *model.buffers(), ids])
    with recorder, head(recorder):
        loss = model(input_ids=ids, labels=ids)["loss"]
        recorder.end_of_forward()
        loss.backward()
        del loss
    return recorder.tape()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_takes_the_memory_and_the_work_of_trls(spec_of, dtype):
    utils = pytest.importorskip("trl.trainer.utils")
    spec = spec_of("llama")
    ours, theirs = (build_model(spec, Task.CAUSAL_LM, dtype=dtype, device="cpu") for _ in range(2))
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")

    class Theirs:
        def __init__(self, recorder):
            utils.add_fused_lm_head(theirs, outputs=outputs)
            inner = theirs.forward
            theirs.forward = lambda **given: {"loss": inner(**given, fused_lm_head=True).log_probs.sum()}

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    one = taped(
        ours,
        lambda recorder: log_probs_head(ours, recorder, on_cuda=False, dtype=getattr(torch, dtype), scored=LENGTH),
    )
    other = taped(theirs, Theirs)
    # A buffer of TRL's is 32,768 words wide whatever the vocabulary; pages that nothing is written to aren't there.
    unused = ROWS * (LENGTH - 1) * (32768 - 512) * (4 if dtype == "float32" else 2)
    assert one.live.sum(axis=1).max() == pytest.approx(other.live.sum(axis=1).max() - unused, rel=0.02)
    uncounted = 2 * 2 * ROWS * (LENGTH - 1) * 64 * 512  # torch's counter of FLOP doesn't know `addmm_`
    products = [tape.flops[tape.kinds == CONTRACTION].sum() for tape in (one, other)]
    assert products[0] == pytest.approx(products[1] + uncounted, rel=1e-6)


def test_on_cuda_only_completions_are_scored_and_in_place(spec_of):
    def peak(scored):
        model = build_model(spec_of("llama"), Task.CAUSAL_LM, dtype="float32", device="meta")
        tape = taped(
            model,
            lambda recorder: log_probs_head(model, recorder, on_cuda=True, dtype=torch.float32, scored=scored),
        )
        return tape.live.sum(axis=1).max()

    tile = ROWS * 8 * 32768 * 4
    assert peak(16) - peak(8) == pytest.approx(tile, rel=0.05)
