"""The backends of torch.compile that a Trainer can be given, by what they are for. Values only.

The names are those of accelerate's `DynamoBackend` (a test holds the table against the installed one) and a few that
guides of another time recommend; what each is for is what torch's and accelerate's documentation says of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

from autotune.errors import suggestion

Use = Literal["training", "debugging", "inference", "other device", "gone"]


@dataclass(frozen=True)
class Backend:
    """A backend and why it isn't one to train with, if it isn't."""

    use: Use
    reason: str = ""


def _inference(what: str) -> Backend:
    return Backend("inference", f"{what} runs forward passes only: for inference, not for training")


def _gone(what: str) -> Backend:
    return Backend("gone", f"{what} is gone from torch; inductor replaced it")


BACKENDS: dict[str, Backend] = {
    "inductor": Backend("training"),
    "cudagraphs": Backend("training"),
    # They run what was traced as it is: slower than no compilation, to find out which stage of it is at fault.
    "aot_eager": Backend("debugging"),
    "eager": Backend("debugging"),
    "onnxrt": _inference("ONNX Runtime"),
    "tensorrt": _inference("TensorRT"),
    "fx2trt": _inference("TensorRT"),
    "tvm": _inference("Apache TVM"),
    "ofi": _inference("TorchScript's optimize_for_inference"),
    "ipex": _inference("the Intel extension's backend"),
    "torchxla_trace_once": _inference("this XLA backend"),
    "openxla": Backend("other device", "openxla needs an XLA device (torch_xla)"),
    "aot_torchxla_trace_once": Backend("other device", "aot_torchxla_trace_once needs an XLA device (torch_xla)"),
    "hpu_backend": Backend("other device", "hpu_backend needs a Gaudi accelerator"),
    "neuron": Backend("other device", "neuron needs an AWS Trainium or Inferentia"),
    "nvfuser": _gone("nvfuser"),
    "aot_nvfuser": _gone("aot_nvfuser"),
    "aot_ts_nvfuser": _gone("aot_ts_nvfuser"),
    "nvprims_nvfuser": _gone("nvprims_nvfuser"),
}


def _known(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{name!r} is no backend of torch.compile{suggestion(name, BACKENDS)}")
    return name


BackendName = Annotated[str, AfterValidator(_known)]

# Of inductor: `torch._inductor.list_mode_options()`.
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
