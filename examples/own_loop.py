"""Your own loop: plain PyTorch, tuned without a Trainer.

For whom: who writes the training loop. Shows `find(step=...)`: a function sets training up for a configuration, using
the knobs that it knows, and returns what does one optimizer step. How long: under five minutes, as effort "quick" has
it; less with `--max-time`.

    python examples/own_loop.py [--width 512]
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

import autotune

GLOBAL_BATCH = 64  # samples per optimizer step, whatever the micro-batch


def main() -> None:
    """Tune the loop and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="of the model (default: %(default)s)")
    parser.add_argument("--max-time", help="of the search, such as 2m; by default what the effort stands for")
    options = parser.parse_args()

    def make_step(config: autotune.TrainConfig, accumulation_steps: int) -> Callable[[], torch.Tensor]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        layer = nn.TransformerEncoderLayer(options.width, nhead=4, dim_feedforward=4 * options.width, batch_first=True)
        model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=config.optim == "adamw_torch_fused")
        samples = torch.randn(config.per_device_train_batch_size, 64, options.width, device=device)

        def step() -> torch.Tensor:
            for _ in range(accumulation_steps):  # your data loader's next micro-batch goes here
                with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
                    loss = (model(samples) - samples).square().mean() / accumulation_steps
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    knobs = {  # what make_step looks at, with the values that it can take; None: the usual ones
        "per_device_train_batch_size": None,
        "precision": ["fp32", "bf16"],
        "optim": ["adamw_torch", "adamw_torch_fused"],
    }
    limits = {"global_batch": GLOBAL_BATCH, "max_time": options.max_time}
    result = autotune.find(step=make_step, knobs=knobs, effort="quick", **limits)
    print(f"{result.verdict}: {result.best.measurement.samples_per_second:.1f} samples/s")
    for knob in knobs:
        print(f"  {knob}: {getattr(result.best.config, knob)}")


if __name__ == "__main__":
    main()
