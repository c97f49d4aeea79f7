"""What torch does on a CUDA device without arithmetic: operators, attention kernels, memory. On the stand-in, too."""

import json
import signal
import subprocess
import time

import pytest
import torch
import torch.nn.functional as F
from running import printed, process
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autotune.cost.kernels import KEEPS_WORKSPACES

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("whole_device")]

MIB, GIB = 1 << 20, 1 << 30


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, device="cuda", dtype=dtype)


def half(*shape):
    return zeros(*shape, dtype=torch.bfloat16)


def grouped_product():
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32, device="cuda")
    return torch._grouped_mm(half(64, 64), half(4, 64, 64), offs=ends)


OPERATORS = {
    "matmul": (lambda: half(256, 128) @ half(128, 64), (256, 64)),
    "linear": (lambda: F.linear(zeros(4, 256), zeros(512, 256), zeros(512)), (4, 512)),
    "addmm and gelu": (lambda: torch._addmm_activation(zeros(512), zeros(4, 256), zeros(256, 512)), (4, 512)),
    "bmm": (lambda: torch.bmm(zeros(4, 8, 16), zeros(4, 16, 8)), (4, 8, 8)),
    "grouped product": (grouped_product, (64, 64)),
    "sort": (lambda: zeros(100).sort()[0], (100,)),
    "topk": (lambda: zeros(100).topk(3)[0], (3,)),
    "cumsum": (lambda: zeros(100).cumsum(0), (100,)),
    "nonzero": (lambda: zeros(100).nonzero(), (0, 1)),
    "index": (lambda: zeros(100, 3)[torch.zeros(4, dtype=torch.long, device="cuda")], (4, 3)),
    "gather": (lambda: zeros(100, 3).gather(0, torch.zeros(4, 3, dtype=torch.long, device="cuda")), (4, 3)),
    "multinomial": (lambda: torch.multinomial(torch.ones(10, device="cuda"), 2), (2,)),
    "fft": (lambda: torch.fft.fft(zeros(16)), (16,)),
}


CONVOLUTIONS = {
    "conv1d": (F.conv1d, (2, 16, 100), (8, 16, 3), (2, 8, 98)),
    "conv2d": (F.conv2d, (2, 16, 32, 32), (8, 16, 3, 3), (2, 8, 30, 30)),
    "conv3d": (F.conv3d, (2, 16, 8, 8, 8), (8, 16, 3, 3, 3), (2, 8, 6, 6, 6)),
    "conv_transpose2d": (F.conv_transpose2d, (2, 16, 32, 32), (16, 8, 3, 3), (2, 8, 34, 34)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_runs(name):
    operator, shape = OPERATORS[name]
    assert operator().shape == shape
    torch.cuda.synchronize()


@pytest.mark.parametrize("benchmark", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_runs_forward_and_backward(name, dtype, benchmark):
    convolve, inputs, weights, outputs = CONVOLUTIONS[name]
    leaves = [zeros(*shape, dtype=dtype).requires_grad_() for shape in (inputs, weights)]
    with torch.backends.cudnn.flags(benchmark=benchmark):
        out = convolve(*leaves)
        out.sum().backward()
    assert out.shape == outputs
    assert [leaf.grad.shape for leaf in leaves] == [inputs, weights]


def test_forward_and_backward_pass_have_a_workspace_each():
    """A workspace is of a handle of cuBLAS, of which every thread has its own; from torch 2.15 on of a product."""
    left, right = zeros(64, 64), zeros(64, 64).requires_grad_()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    out = left @ right
    forward = torch.cuda.memory_allocated() - before - out.nbytes
    out.backward(zeros(64, 64))
    backward = torch.cuda.memory_allocated() - before - out.nbytes - forward - right.grad.nbytes
    assert (forward >= 4 * MIB) == KEEPS_WORKSPACES
    assert backward == forward


def test_channels_last_and_batch_norm_run():
    block = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU()).cuda()
    block = block.to(memory_format=torch.channels_last)
    images = zeros(2, 16, 32, 32).to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.float16):
        out = block(images)
    out.sum().backward()
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_a_mask_that_masks_nothing_is_seen_as_such_where_bytes_were_copied_in_before():
    copied = [torch.tensor(False).cuda() for _ in range(1000)]
    places = {each.data_ptr() for each in copied}
    del copied
    found = torch.ones(2, 8, dtype=torch.bool, device="cuda").all()
    assert found.data_ptr() in places
    assert found.item()


@pytest.mark.parametrize(
    ("dtype", "kernel", "masked"),
    [
        (torch.bfloat16, SDPBackend.FLASH_ATTENTION, False), (torch.bfloat16, SDPBackend.EFFICIENT_ATTENTION, True),
        (torch.float32, SDPBackend.EFFICIENT_ATTENTION, False), (torch.float32, SDPBackend.MATH, False),
    ],
    ids=str,
)  # fmt: skip
def test_an_attention_kernel_runs_forward_and_backward_and_leaves_its_gradients_alone(dtype, kernel, masked):
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bf16 attention needs compute capability 8.0")
    leaves = [zeros(2, 4, 128, 64, dtype=dtype).requires_grad_() for _ in range(3)]
    mask = torch.ones(2, 1, 128, 128, device="cuda", dtype=torch.bool) if masked else None
    before = torch.cuda.memory_allocated()
    with sdpa_kernel(kernel):
        F.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=not masked).sum().backward()
    left = torch.cuda.memory_allocated() - before
    assert 0 <= left - sum(leaf.grad.nbytes for leaf in leaves) <= 20 * MIB  # cuBLAS's workspace


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_an_optimizer_keeps_two_states(options):
    layer = nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.AdamW(layer.parameters(), **options)
    for _ in range(2):
        layer(zeros(2, 1024)).sum().backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        before = torch.cuda.memory_allocated()
        optimizer.step()
    assert torch.cuda.memory_allocated() == before
    kept = {name: state for name, state in optimizer.state[layer.weight].items() if name != "step"}
    assert sum(state.nbytes for state in kept.values()) == 2 * layer.weight.nbytes


def test_eight_bit_optimizers_and_weights_run():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = nn.Linear(4096, 4096).cuda()
    layer(torch.ones(2, 4096, device="cuda")).sum().backward()
    for kind in (bitsandbytes.optim.AdamW8bit, bitsandbytes.optim.PagedAdamW8bit):
        optimizer = kind(layer.parameters())
        optimizer.step()
        assert optimizer.state[layer.weight]["state1"].dtype is torch.uint8
    packed = bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4").cuda()
    assert packed(torch.ones(2, 64, device="cuda")).shape == (2, 64)
    assert packed.weight.numel() == 64 * 64 // 2


def test_more_than_the_device_has_is_out_of_memory_and_says_so():
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate") as caught:
        torch.empty(2 * total, device="cuda", dtype=torch.uint8)
    assert f"total capacity of {total / GIB:.2f} GiB" in str(caught.value)
    assert zeros(10).shape == (10,)


def test_the_allocators_cap_is_kept():
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(GIB / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"1024\.00 MiB allowed"):
            torch.empty(2 * GIB, device="cuda", dtype=torch.uint8)
        torch.empty(GIB // 2, device="cuda", dtype=torch.uint8)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


HOLD = """
import time, torch
kept = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
print("held", flush=True)
time.sleep(300)
"""


def test_processes_share_the_device_and_one_that_is_killed_holds_nothing():
    zeros(1)
    free = torch.cuda.mem_get_info()[0]
    with subprocess.Popen(**process("-c", HOLD), stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == "held\n"
            assert free - torch.cuda.mem_get_info()[0] >= GIB + 50 * MIB  # and its context
        finally:
            other.kill()
    assert other.returncode == -signal.SIGKILL
    ends = time.monotonic() + 10
    while torch.cuda.mem_get_info()[0] != free:  # a GPU's driver may take a moment
        assert time.monotonic() < ends


def test_expandable_segments_reserve_what_is_allocated():
    code = (
        "import json, torch\n"
        "kept = [torch.empty(n * 3 << 20, device='cuda', dtype=torch.uint8) for n in (1, 5, 9)]\n"
        "print(json.dumps([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]))"
    )
    (line,) = printed("-c", code, PYTORCH_ALLOC_CONF="expandable_segments:True")
    allocated, reserved = json.loads(line)
    assert allocated == 45 * MIB
    assert allocated <= reserved <= allocated + 20 * MIB


def test_a_device_between_two_that_kernels_are_built_for_sorts():
    """Compute capability 8.9 runs the kernels of 8.6; on a GPU the device stays what it is."""
    rows = "torch.zeros(4096, dtype=torch.long, device='cuda')"
    code = f"import torch; torch.nn.Embedding(1000, 8, device='cuda')({rows}).sum().backward()"
    assert printed("-c", code, FAKECUDA_CC="8.9") == []
