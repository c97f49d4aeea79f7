"""Traces a step as inductor runs it on a CUDA device: its graphs, its kernels and its buffers.

Dynamo, AOTAutograd's partitioner and inductor's scheduler work as in a training, on fake tensors. The programs that
inductor writes are run with kernels that do nothing, while a recorder looks on: each buffer is made, used again and
dropped where the program does so. Torch's CUDA build is needed, and a device of the generation that is predicted for. A
step is compiled for one micro-batch, a multiple of a prime number: sizes that it divides grow with the micro-batch.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch._prims.rng_prims import graphsafe_run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.cost.family import Family, Generation, Shape, generation_of
from autotune.cost.kernels import scratch_bytes
from autotune.cost.profile import ELEMENTWISE, NORMALISATION
from autotune.cost.tape import Recorder, Tape
from autotune.cost.trace import make_inputs
from autotune.training.loss import base_model, normalize_loss

_PRIME = 13  # divides no usual width, length or vocabulary


def compiled_step(model: Any, family: Family, shape: Shape, samples: Sequence[int]) -> list[Tape]:
    """Return the tapes of a compiled model's forward and backward pass, one for each micro-batch in `samples`.

    The model is of the meta device and isn't of use afterwards. Raises whatever a compiler raises, and RuntimeError
    where there is no device of the family's generation.
    """
    if not torch.cuda.is_available() or generation_of(torch.cuda.get_device_capability()) != family.generation:
        raise RuntimeError("compiled programs are traced on a device of the same generation alone")
    traced = _PRIME if _PRIME * shape.length % 8 == 0 else 8 * _PRIME
    recorders: list[_ProgramRecorder] = []
    torch._dynamo.reset()
    with _programs_alone(recorders), FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = _on_device(model)
        inputs = make_inputs(model.config, shape, traced, device="cuda")
        # The Trainer's count of a step's labels.
        inputs |= {"num_items_in_batch": torch.ones((), dtype=torch.long, device="cuda")}
        normalize_loss(model)
        base, every = base_model(model), family.checkpointed_every
        if family.checkpointing != "none":
            options = {"every_n_layers": every} if every > 1 else {}
            base.gradient_checkpointing_enable({"use_reentrant": False}, **options)
        elif base.supports_gradient_checkpointing:
            base.gradient_checkpointing_disable()
        if family.autocast is not None:  # as `Accelerator.prepare_model` has it run
            cast = torch.autocast("cuda", getattr(torch, family.autocast))(model.forward.__func__)
            model.forward = MethodType(convert_outputs_to_fp32(cast), model)
        compiled: Any = torch.compile(model)
        for _ in range(2):  # some heads settle in the first what they compute, which is then compiled anew
            compiled(**inputs)["loss"].backward()
        known, tapes = [*tensors, *inputs.values()], []
        for count in samples:
            recorders[:] = [_ProgramRecorder(known, count / traced, family.generation)]
            with recorders[0] as recorder:
                tapes.append(recorder.step(compiled, lambda: compiled(**inputs)["loss"]))
    torch._dynamo.reset()
    return tapes


class _ProgramRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Writes down what inductor's programs do, with sizes that grow with the micro-batch times `factor`."""

    def __init__(self, known: list[torch.Tensor], factor: float, generation: Generation) -> None:
        self._factor = factor  # before known tensors are looked at
        super().__init__(known, partial(scratch_bytes, generation=generation))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a model would not be compiled under a recorder otherwise

    def scaled(self, size: float) -> float:
        return size * self._factor if size % _PRIME == 0 else size

    def sized(self, nbytes: int, tensor: torch.Tensor) -> float:
        return nbytes * self._factor if tensor.numel() % _PRIME == 0 else nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        # Equal layers may make a buffer anew or use an old one again, and saved tensors are detached all at once.
        if name not in ("as_strided", "detach", "device", "empty_strided"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **(kwargs or {}))
        if name == "empty_strided":
            self.watch_buffer(out, self._module())
        return out

    def tape(self, outputs_bytes: float = 0.0) -> Tape:
        tape = super().tape(outputs_bytes)

        def scaled(number: re.Match[str]) -> str:
            return str(int(self.scaled(int(number[0]))))

        calls = tuple("" if c.startswith('["triton_') else re.sub(r"\d+", scaled, c) for c in tape.calls)
        return replace(tape, flops=np.array([self.scaled(count) for count in tape.flops.tolist()]), calls=calls)


@graphsafe_run_with_rng_state.py_impl(_ProgramRecorder)  # type: ignore[untyped-decorator]
def _with_random_state(recorder: _ProgramRecorder, func: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
    """Run dropout of a checkpointed layer, which draws the same numbers when it runs again."""
    with recorder:
        return func(*args, **kwargs)


@contextlib.contextmanager
def _programs_alone(recorders: list[_ProgramRecorder]) -> Iterator[None]:
    """Have inductor write its programs, and neither compile their kernels nor keep anything."""
    from torch._C._dynamo import guards
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    def kernel(_: Any, name: str, *__: Any, **___: Any) -> SimpleNamespace:
        """Return one of inductor's fused kernels, whose launches are written down."""
        kind = ELEMENTWISE if name.startswith("triton_poi") else NORMALISATION

        def run(*args: Any, **_: Any) -> None:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            for recorder in recorders:
                recorder.note_kernel(re.sub(r"_\d+$", "", name), 0.0, *tensors, kind=kind)

        return SimpleNamespace(run=run)

    def made(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    def seen_as(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    with (
        config.patch(force_disable_caches=True),
        mock.patch.multiple(AsyncCompile, triton=kernel, wait=lambda *_: None),
        # In C++ they pass fake tensors by.
        mock.patch.multiple(guards, _empty_strided_cuda=made, _reinterpret_tensor=seen_as),
    ):
        yield


def _on_device(model: Any) -> list[torch.Tensor]:
    """Replace the tensors of a model by fake ones on the device; return these."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in moved:
                    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    moved[id(tensor)] = torch.nn.Parameter(made, tensor.requires_grad) if is_weight else made
                if tensor is not None:
                    own[name] = moved[id(tensor)]
    return list(moved.values())
