"""Values computed on the host beside the stand-in: what a CPU says, or an error that says where."""

import json

import pytest
import torch
import torch.nn.functional as F
from running import printed

from autotune.stand_in import host_values

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("whole_device")]


def on(device):
    """Return tensors as a collator makes them, moved to a device."""
    return (
        torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).to(device),
        torch.tensor([[-100, 5, 7, -100], [3, -100, 2, 9]]).to(device),
        torch.tensor([[1, 16, 20], [2, 8, 8]]).to(device),
        torch.tensor([[[0.0, 0.5], [1.0, 2.0]], [[0.0, 0.0], [0.0, 0.0]]]).to(device),
    )


KNOWN = {
    "a mask that masks": lambda mask, *_: mask.bool().all(),
    "lengths": lambda mask, *_: mask.sum(-1),
    "positions": lambda mask, *_: (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1),
    "places": lambda mask, *_: mask.nonzero(),
    "places of a condition": lambda mask, *_: torch.where(mask == 1)[1],
    "chosen": lambda mask, labels, *_: labels[mask.bool()],
    "masked_select": lambda mask, labels, *_: labels.masked_select(labels != -100),
    "how many count": lambda mask, labels, *_: (labels[:, 1:] != -100).sum(),
    "a mean of whole numbers": lambda mask, *_: mask.float().mean(),
    "shifted": lambda mask, labels, *_: F.pad(labels, (0, 1), value=-100)[..., 1:],
    "joined": lambda mask, labels, *_: torch.cat([labels, mask]).flip(0),
    "different ones": lambda mask, labels, *_: labels.unique(),
    "sorted": lambda mask, labels, *_: labels.flatten().sort()[0],
    "counted": lambda mask, *_: torch.bincount(mask.flatten()),
    "scattered": lambda mask, labels, *_: torch.zeros_like(labels).scatter_(1, mask, 4),
    "one hot": lambda mask, *_: F.one_hot(mask, 3).sum((0, 1)),
    "sizes of images": lambda mask, labels, grid, _: grid.prod(-1),
    "bounds of images": lambda mask, labels, grid, _: torch.repeat_interleave(
        grid[:, 1] * grid[:, 2], grid[:, 0]
    ).cumsum(0, dtype=torch.int32),
    "empty images": lambda mask, labels, grid, pixels: (pixels == 0).all(-1).all(-1),
    "a column of much data": lambda mask, *_: (torch.ones(40000, 2).to(mask.device)[:, 0] > 0).nonzero().sum(),
    "whole numbers in place": lambda mask, labels, *_: labels.clone().clamp_(min=0).add_(2).mul_(3),
    "a part of one": lambda mask, labels, *_: labels.clone().index_fill_(1, mask[0, :1], 8),
    "made there": lambda mask, *_: (
        torch.arange(5, device=mask.device) + torch.ones(5, dtype=torch.long, device=mask.device)
    ),
    "a view written": lambda mask, *_: mask.clone().view(-1).fill_(6).view(2, 4)[:, :2],
    "without NaN": lambda mask, labels, grid, pixels: (
        torch.isnan(pixels @ pixels).any() | torch.isinf(pixels * 2).any()
    ),
    "powers of a number": lambda mask, labels, *_: 2.0**labels,
    "which is one of them": lambda mask, labels, *_: torch.isin(7, labels),
    "a kernel that leaves the CPU another buffer": lambda mask, labels, grid, pixels: F.logsigmoid(pixels),
    "batch normalization": lambda mask, labels, grid, pixels: F.batch_norm(pixels, None, None, training=True),
    "drawn at random": lambda mask, *_: (
        (torch.rand(2, 4, device=mask.device) < 2).nonzero() + torch.randint(3, 4, (8, 2), device=mask.device)
    ),
    "made sparse": lambda mask, *_: (mask.to_sparse(), mask)[1],
    "beside text of a model's output": lambda mask, labels, grid, pixels: (f"{of_a_model(pixels)}", mask)[1],
    "a loss": lambda mask, labels, grid, pixels: (pixels @ pixels).mean() * 0,
}


def of_a_model(pixels):
    return torch.nn.Linear(2, 2).to(pixels.device)(pixels).detach()


UNKNOWN = {
    "a choice": lambda mask, labels, grid, pixels: bool((of_a_model(pixels) > 0).any()),
    "its place": lambda mask, labels, grid, pixels: of_a_model(pixels).argmax(-1).tolist(),
    "chosen by it": lambda mask, labels, grid, pixels: pixels[of_a_model(pixels) > 1],
    "of weights drawn there": lambda mask, labels, grid, pixels: bool(
        (torch.nn.Linear(2, 2, device=pixels.device)(pixels) > 0).any()
    ),
    "counted in place": lambda mask, labels, grid, pixels: of_a_model(pixels).long().add_(1).tolist(),
    "written into what was known": lambda mask, labels, grid, pixels: (
        labels.clone().copy_(of_a_model(pixels).long().view(2, 4)).tolist()
    ),
    "written by a kernel of Triton": lambda mask, *_: (mask.data_ptr(), mask.tolist()),
    "caught by the program": lambda *tensors: _caught(*tensors),
}


def _caught(mask, labels, grid, pixels):
    try:
        (of_a_model(pixels) > 0).any().item()
    except Exception:
        host_values.check()


def main():
    host_values.install()
    found = {name: case(*on("cuda")).tolist() for name, case in KNOWN.items()}
    for name, case in UNKNOWN.items():
        try:
            found[name] = f"told {case(*on('cuda'))}"
        except host_values.UnknownValueError as error:
            found[name] = str(error)
    for kind in (torch.bool, torch.uint8):
        for _ in range(8):
            torch.zeros(64 << 20, dtype=kind, device="cuda")
    found["held MiB"] = sum(held.nbytes() for _, held in host_values._known.values()) >> 20
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found():
    return json.loads(printed(__file__)[-1])


@pytest.mark.parametrize("name", KNOWN)
def test_what_comes_from_the_host_is_what_a_cpu_says(found, name):
    assert found[name] == KNOWN[name](*on("cpu")).tolist()


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_only_a_gpu_computes_is_refused_with_the_place(found, name):
    assert "that only a GPU computes, on which the memory may depend" in found[name]
    assert f"{__file__}:" in found[name]


def test_large_tensors_that_are_gone_take_none_of_the_hosts_memory(found):
    assert 64 <= found["held MiB"] < 2 * 64


def test_memory_is_that_without_it():
    program = """
import sys, torch
import torch.nn.functional as F
from autotune.stand_in import host_values
from torch import nn
if sys.argv[1] == "with": host_values.install()
layers = [nn.TransformerEncoderLayer(256, 4, batch_first=True) for _ in range(2)]
net = nn.Sequential(nn.Embedding(5000, 256), *layers, nn.Linear(256, 5000)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
for _ in range(3):
    ids = torch.randint(5000, (4, 128)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
made = torch.cuda.memory_stats()["allocation.all.allocated"]  # a gradient that is added to in place is none
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), made)
"""
    (on, off) = (list(map(int, printed("-c", program, how)[-1].split())) for how in ("with", "without"))
    assert on[::2] == off[::2]
    assert abs(on[1] - off[1]) <= 2 << 20  # a block that Python holds for a moment longer


if __name__ == "__main__":
    main()
