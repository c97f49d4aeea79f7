"""What measures a device measures the arithmetic that it says, whatever the process began with."""

from types import SimpleNamespace

import pytest
import torch

from autotune.cost import benchmark
from autotune.cost.benchmark import matmul_flops
from autotune.cost.calibrate import TINY_SIZES


@pytest.fixture(params=["highest", "high"])
def began_with(request):
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("arithmetic", "products"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")])
@pytest.mark.usefixtures("began_with")
def test_products_are_those_of_the_arithmetic_that_is_measured(monkeypatch, arithmetic, products):
    seen = []

    def seconds(work):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return 1.0

    monkeypatch.setattr(benchmark, "_layer", lambda *of: None)  # there is no device to put tensors on
    matmul_flops(SimpleNamespace(device=torch.device("cuda"), sizes=TINY_SIZES, seconds=seconds), arithmetic)
    assert seen == [products]
