"""Trains with the answer of a search, with transformers' own Trainer and nothing else of autotune.

    autotune find --model t5-small -o best-config.json
    python examples/train_with_result.py best-config.json --steps 20

The last line is JSON: the throughput of this very run beside that which the search measured. An answer for one device
needs CUDA_VISIBLE_DEVICES on a machine with several GPUs, or the Trainer takes them all. One for several devices
(`--devices`) is started by torchrun, as `result.launch_commands` has it:

    torchrun --standalone --nproc_per_node 2 examples/train_with_result.py best-config.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

import autotune


def main() -> None:
    """Train some steps and print how fast they were."""
    options = parse_options()
    result = autotune.load(options.config)

    # Everything the search decided; whatever else TrainingArguments knows can be given here. It comes before the model:
    # where there are several devices, their processes meet here.
    arguments = result.training_arguments(
        options.output_dir, max_steps=options.steps, save_strategy="no", report_to="none", disable_tqdm=True
    )

    # Random weights, so that this runs without a download. To start from a checkpoint instead:
    #     model = AutoModelForSeq2SeqLM.from_pretrained("google-t5/t5-small", **result.model_kwargs())
    model = result.build_model()

    # Puts the adapter on, if LoRA won, and makes the loss independent of how a step is split into micro-batches.
    model = result.prepare_model(model)

    # Of all devices together; ranks that share matrices (tensor parallel) see the same samples.
    samples_per_step = result.workload.samples_per_step(result.best.config)

    # The samples of the search; your own dataset and collator go here.
    with arguments.main_process_first():
        dataset, collator = result.training_data(
            options.steps * samples_per_step, directory=Path(options.output_dir) / "lengths"
        )

    clock = StepClock()
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator, callbacks=[clock])
    loss = trainer.train().training_loss
    if torch.distributed.is_initialized():  # processes that end while others still talk to them are aborted
        torch.distributed.destroy_process_group()

    measured = result.best.measurement
    if not arguments.should_log:  # another rank does
        return
    print(
        json.dumps(
            {
                "samples_per_second": (options.steps - 1) * samples_per_step / (clock.last_s - clock.first_s),
                "measured_by_autotune": measured.samples_per_second if measured else None,
                "steps": options.steps,
                "samples_per_step": samples_per_step,
                "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
                "loss": loss,
            }
        )
    )


class StepClock(TrainerCallback):
    """Notes when the first and the last optimizer step end; the first one warms up and compiles."""

    first_s = last_s = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the clock once the device has done all its work."""
        if state.global_step in (1, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.first_s, self.last_s = self.first_s or time.perf_counter(), time.perf_counter()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="the best-config.json of a search")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, default=Path("out"), help="of the Trainer (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first is not timed")
    return options


if __name__ == "__main__":
    main()
