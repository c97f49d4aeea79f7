"""A pipeline of your own: layers spread over devices, tuned by its schedule and its micro-batches.

For whom: who trains with `torch.distributed.pipelining`, which the Trainer doesn't. Shows `find(step=..., devices=N)`,
whose ranks are started as by torchrun, and a knob that the loop declares itself. How long: under five minutes on two
processes of a CPU, as effort "quick" has it; less with `--max-time`.

    python examples/pipeline_loop.py [--devices 2] [--width 128]
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import pipelining

import autotune

GLOBAL_BATCH = 32  # samples per optimizer step, cut into micro-batches that run through the stages one after another
TOKENS, LAYERS = 64, 8
SCHEDULES = {  # with the stages that each device has
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
}


def pipeline(width: int) -> Callable[..., Callable[[], torch.Tensor | None]]:
    """Return the function that sets the training of a model of this width up."""

    def make_step(
        config: autotune.TrainConfig, accumulation_steps: int, schedule: str
    ) -> Callable[[], torch.Tensor | None]:
        if not distributed.is_initialized():  # it is, in autotune's processes
            distributed.init_process_group()
        rank, world = distributed.get_rank(), distributed.get_world_size()
        device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
        kind, of_each = SCHEDULES[schedule]
        count = world * of_each
        if LAYERS % count:
            raise ValueError(f"{LAYERS} layers make no {count} equal stages")
        if schedule == "1f1b" and accumulation_steps < count:
            raise ValueError(f"1F1B fills {count} stages with as many micro-batches at least")
        size = config.per_device_train_batch_size
        micro_batch = torch.empty(size, TOKENS, width, device="meta", requires_grad=True)
        shapes = {"input_args": (micro_batch,), "output_args": (micro_batch,)}  # otherwise found out in the first step
        stages = []
        for index in range(rank, count, world):
            layers = [
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
                for _ in range(LAYERS // count)
            ]
            stages.append(pipelining.PipelineStage(nn.Sequential(*layers).to(device), index, count, device, **shapes))
        is_first, is_last = rank == 0, rank == world - 1
        run = kind(
            stages if of_each > 1 else stages[0], n_microbatches=accumulation_steps, loss_fn=nn.functional.mse_loss
        )
        optimizer = torch.optim.AdamW([p for stage in stages for p in stage.submod.parameters()])
        samples = torch.randn(GLOBAL_BATCH, TOKENS, width, device=device)

        def step() -> torch.Tensor | None:
            losses: list[torch.Tensor] = []
            given = {"target": samples, "losses": losses} if is_last else {}
            run.step(*([samples] if is_first else []), **given)
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).mean() if losses else None

        return step

    return make_step


def knobs(devices: int) -> dict[str, Any]:
    """Return what `make_step` looks at, and the knob that it declares."""
    return {
        "model_parallel": [devices],  # all devices share each sample: one pipeline
        "per_device_train_batch_size": None,
        "schedule": autotune.OwnKnob(choices=tuple(SCHEDULES), allowance="exact"),  # the same gradients, in any order
    }


def main() -> None:
    """Tune the pipeline and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="of the pipeline (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: %(default)s)")
    parser.add_argument("--max-time", help="of the search, such as 2m; by default what the effort stands for")
    options = parser.parse_args()
    limits = {"global_batch": GLOBAL_BATCH, "devices": options.devices, "max_time": options.max_time}
    result = autotune.find(step=pipeline(options.width), knobs=knobs(options.devices), effort="quick", **limits)
    print(f"{result.verdict}: {result.best.measurement.samples_per_second:.1f} samples/s")
    print(f"  schedule {result.best.config.own.schedule}")
    print(f"  micro-batches of {result.best.config.per_device_train_batch_size}")


if __name__ == "__main__":
    main()
