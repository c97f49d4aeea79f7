"""Sizes and lifetimes of storages, and the work of operators, as they are written down."""

import numpy as np
import pytest
import tapes
import torch
import torch.nn.functional as F
from tapes import live

from autotune.cost.kernels import scratch_bytes
from autotune.cost.profile import ACTIVATION, CONTRACTION, ELEMENTWISE, FRESH, GRADIENT, NORMALISATION, TEMPORARY, VIEW
from autotune.cost.tape import Recorder, Tape

BYTES = 400  # of a vector of 100


def weight(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.ones(shape or (100,), device="meta", dtype=dtype, requires_grad=True)


def tape_of(loss, *known: torch.Tensor) -> Tape:
    """The tape of a loss, a function of the known tensors, forward and backward."""

    def marked(recorder):
        for tensor in known:
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(lambda p: recorder.mark_gradient(p.grad))
        return loss(*known)

    return tapes.tape_of(marked, *known)


def forward_tape_of(compute) -> Tape:
    """The tape of something without a backward pass; what it returns is alive to the end."""
    recorder = Recorder([])
    with recorder, torch.no_grad():
        kept = compute()
        recorder.end_of_forward()
    tape = recorder.tape()
    del kept
    return tape


def at(tape: Tape, name: str, occurrence: int = 0) -> int:
    return [i for i, n in enumerate(tape.names) if n == name][occurrence]


def test_a_tensor_without_a_reference_is_gone_at_the_next_operator():
    def compute():
        first = torch.empty(100, device="meta")
        second = first + 1
        del first
        return second * 2

    tape = forward_tape_of(compute)
    assert tape.names == ("empty", "add", "mul")
    assert live(tape).sum(axis=1).tolist() == [BYTES, 2 * BYTES, 2 * BYTES]
    assert tape.storages.tolist() == [[0, 2, BYTES, 0, 0], [1, 3, BYTES, 0, 0], [2, 4, BYTES, 0, 0]]


def test_weights_and_inputs_are_not_counted():
    tape = tape_of(lambda w: w.sum(), weight())
    assert live(tape).max() <= BYTES  # the gradient
    assert live(tape)[: tape.forward_end].sum(axis=1).max() == 4  # the loss


def test_views_and_operators_in_place_take_nothing_and_only_the_latter_move_bytes():
    view = forward_tape_of(lambda: torch.empty(100, device="meta").view(10, 10))
    in_place = forward_tape_of(lambda: torch.empty(100, device="meta").mul_(2))
    assert [live(tape).sum(axis=1).tolist() for tape in (view, in_place)] == [[BYTES] * 2] * 2
    assert [tape.moved_bytes.tolist() for tape in (view, in_place)] == [[0, 0], [0, 2 * BYTES]]
    assert [tape.kinds.tolist() for tape in (view, in_place)] == [[VIEW, VIEW], [VIEW, ELEMENTWISE]]


def test_a_tensor_that_the_backward_pass_needs_is_an_activation_until_then():
    """The exponential keeps its result, the factor of a product with a number doesn't."""
    tape = tape_of(lambda w: (w.exp() * 2).sum(), weight())
    saved, product, last = at(tape, "exp"), at(tape, "mul"), at(tape, "mul", occurrence=2)
    assert live(tape)[[saved, product], ACTIVATION].tolist() == [BYTES, BYTES]
    assert live(tape)[product, TEMPORARY] == BYTES
    assert live(tape)[last : last + 2, ACTIVATION] == pytest.approx([BYTES, 0], abs=8)  # gradient times exponential


def test_a_fresh_gradient_ends_where_it_would_be_added_to_an_earlier_one():
    tape = tape_of(lambda w, v: ((w * 2).exp() + (v * 2).exp()).sum(), weight(), weight())
    assert live(tape)[:, GRADIENT].max() == 2 * BYTES
    assert live(tape)[:, FRESH].max() == BYTES
    assert not (live(tape)[:, FRESH] > live(tape)[:, GRADIENT]).any()


def test_autograd_really_adds_in_place():
    places = []
    root = torch.ones(100, requires_grad=True)
    middle = root.exp()
    left, right = middle * 2, middle * 3
    for product in (left, right):
        product.grad_fn.register_hook(lambda of_inputs, _: places.append(of_inputs[0].data_ptr()))
    middle.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    (left.sum() + right.sum()).backward()
    first, _, total = places
    assert total == first


def test_a_sum_of_the_forward_pass_is_a_tensor_of_its_own():
    def compute():
        first, second = torch.empty(100, device="meta"), torch.empty(100, device="meta")
        return first + second

    assert live(forward_tape_of(compute)).sum(axis=1).max() == 3 * BYTES


def test_a_layer_is_a_product_forward_and_two_backward_of_two_operations_for_each_multiplication():
    tape = tape_of(lambda w, x: torch.nn.functional.linear(x, w).sum(), weight(7, 5), weight(3, 5))
    contractions = tape.kinds == CONTRACTION
    assert tape.flops[contractions].tolist() == [2 * 3 * 5 * 7] * 3
    assert contractions[: tape.forward_end].sum() == 1


@pytest.mark.parametrize(
    ("compute", "kind"),
    [
        (lambda x: x + 1, ELEMENTWISE),
        (lambda x: x.softmax(0), NORMALISATION),
        (lambda x: torch.nn.functional.layer_norm(x, (100,)), NORMALISATION),
        (lambda x: x[None] @ x[:, None], CONTRACTION),
    ],
)
def test_operators_are_told_apart_by_kind(compute, kind):
    assert forward_tape_of(lambda: compute(torch.empty(100, device="meta"))).kinds[-1] == kind


@pytest.mark.parametrize(
    ("compute", "flops", "moved"),
    [
        (lambda x: x + torch.empty(100, device="meta"), 100, 3 * BYTES),  # what is read and written
        (lambda x: x + 1, 100, 2 * BYTES),  # a number moves nothing
        (torch.empty_like, 0, 0),  # making room is no work
    ],
    ids=["two tensors", "a number", "room"],
)
def test_element_wise_operators_move_the_bytes_that_they_read_and_write(compute, flops, moved):
    tape = forward_tape_of(lambda: compute(torch.empty(100, device="meta")))
    assert (tape.flops.sum(), tape.moved_bytes.sum()) == (flops, moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_16_bits_are_told(dtype):
    tape = forward_tape_of(lambda: torch.empty(10, device="meta", dtype=dtype) + 1)
    assert tape.widths[-1] == (4 if dtype is torch.float32 else 2)


def test_the_same_on_a_device_that_computes():
    """Sizes and lifetimes on the meta device are those of a real run."""

    def loss(w):
        return ((w.exp() * w).softmax(0) ** 2).sum()

    meta = tape_of(loss, weight())
    real = tape_of(loss, torch.ones(100, requires_grad=True))
    assert meta.names == real.names
    assert np.array_equal(live(meta), live(real))


@pytest.mark.parametrize("view", [False, True])
def test_autograd_adds_to_the_gradient_that_it_holds_alone_in_place_but_not_to_a_view(view):
    """What a view is of holds its storage as well, as with the transposed gradient of a linear layer."""

    def tied(w):
        looked_up = torch.nn.functional.embedding(torch.zeros(8, dtype=torch.long, device="meta"), w).sum()
        first = torch.nn.functional.linear(w.detach(), w) if view else w * w.detach()
        return looked_up + first.sum()

    tape = tape_of(tied, weight(64, 64))
    adds = [i for i, name in enumerate(tape.names) if name == "add" and i > tape.forward_end]
    made = {row[0] for row in tape.storages}
    assert any(i in made for i in adds) == view


@pytest.mark.parametrize(
    ("dims", "found"), [((0, 1), (6, 4)), ((0,), (2, 12)), ((-3, -2), (6, 4)), ((2,), (0, 0)), ((0, 1, 2), (0, 0))]
)
def test_sums_over_the_rows_of_a_matrix_are_written_down(dims, found):
    """Rows and columns; what such a sum takes of the allocator is no line in the micro-batch, so `live` lacks it."""
    tensor = torch.empty(2, 3, 4, device="meta")
    recorder = Recorder([tensor], lambda name, args, out: 0)
    with recorder:
        result = tensor.sum(dims)
    tape = recorder.tape()
    summed = [(size, columns) for *_, size, _, columns in tape.storages.tolist() if columns]
    assert summed == [found] * (found != (0, 0))
    assert live(tape).sum() == result.nbytes


@pytest.mark.parametrize(("shape", "found"), [((2, 3, 3, 4), [(18, 4)]), ((2, 4, 3, 3), [])])
def test_the_gradient_of_a_convolutions_bias_is_such_a_sum_where_channels_come_last(shape, found):
    images, gradient = torch.empty(2, 5, 3, 3, device="meta"), torch.empty(shape, device="meta")
    convolution = torch.nn.Conv2d(5, 4, 1, device="meta")
    with Recorder([images, gradient, *convolution.parameters()], lambda name, args, out: 0) as recorder:
        convolution(images).backward(gradient.movedim(-1, 1) if found else gradient)
    assert [(size, columns) for *_, size, _, columns in recorder.tape().storages.tolist() if columns] == found


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy])
def test_a_mean_loss_keeps_the_memory_of_all_its_elements(loss):
    real = torch.ones(8, 100)
    assert loss(real, real).untyped_storage().nbytes() == 3200
    found, other = (torch.empty(8, 100, device="meta") for _ in range(2))
    with Recorder([found, other]) as recorder:
        kept = loss(found, other)
        recorder.end_of_forward()
    assert kept.shape == ()
    assert recorder.tape().storages[:, 2].tolist() == [3200]
    whole = scratch_bytes("mse_loss", (found, other), kept), scratch_bytes("mse_loss", (found, other), found)
    assert whole == (3200, 0)
