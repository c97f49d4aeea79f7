"""A trial's entry on a machine without accelerators: has accelerate take processes on a CPU for devices that can shard.

`AcceleratorState` makes FSDP of an accelerator's processes alone, and leaves those of a CPU to DDP without a word;
tensor parallel is refused there. torch itself does both on the CPU, with gloo. Offload pins the host's memory, for
which there must be a device. Losses that ranks gather are sent back as NCCL does it: torch's stand-in over gloo takes
numbers within a group for those of all ranks. Ranks that share a sample's tokens run torch's ring around its attention
for the CPU, where it has handlers for those of CUDA.
"""

from pathlib import Path
from typing import Any


def run_trial(directory: Path) -> None:
    """Run the request in `directory` as the worker does."""
    from autotune.execution import launch

    _let_shard()
    _let_pass_on()
    launch.run_trial(directory)


def _let_shard() -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torch.distributed.nn import functional

    original, multi_device = AcceleratorState.__init__, Accelerator.multi_device

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)

    def on_several(self: Any) -> bool:
        shares_matrices = self.parallelism_config is not None and self.parallelism_config.tp_enabled
        on_cpu = self.distributed_type == DistributedType.MULTI_CPU
        return bool(multi_device.fget(self)) or (shares_matrices and on_cpu)

    def reduce_scatter(ctx: Any, *gradients: Any) -> Any:
        summed = torch.stack(gradients)
        torch.distributed.all_reduce(summed, group=ctx.group)
        return None, summed[torch.distributed.get_rank(ctx.group)]

    functional._AllGather.backward = staticmethod(reduce_scatter)
    AcceleratorState.__init__ = init
    Accelerator.multi_device = property(on_several)


def _let_pass_on() -> None:
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel

    aten: Any = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def handle(op: Any, args: Any, kwargs: Any) -> Any:
        given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
        mesh, placements = given["query"].device_mesh, given["query"].placements
        local = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in given.items()}
        local.pop("attn_mask", None)
        if op is attention:
            found = context_parallel._templated_ring_attention(mesh.get_group(), 2, op, **local)
        else:
            found = context_parallel._templated_ring_attention_backward(
                mesh.get_group(), 2, op, grad_out=local.pop("grad_out"), grad_out_name="grad_out", **local
            )
        return tuple(DTensor.from_local(one, mesh, placements) for one in found)

    context_parallel.custom_ops.update({attention: handle, backward: handle})
