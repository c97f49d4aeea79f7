"""Estimate for a card that you don't have: whether a model fits, and how fast it would train.

For whom: who is about to rent or buy a GPU. Shows `autotune.estimate`, which traces the model and runs nothing.
How long: half a minute for llama-3-8b on one CPU core, without a GPU.

    python examples/estimate_for_a_card.py [llama-3-8b] [--gpu rtx-4090 a100-80gb h100-80gb]
"""

from __future__ import annotations

import argparse

import autotune
from autotune.values.catalogue import gpu_named

COMMON = {"per_device_train_batch_size": 1, "attn_implementation": "sdpa", "checkpointing": "full"}
LORA = {"precision": "pure_bf16", "adapter": autotune.LoraAdapter(rank=16), **COMMON}
CONFIGS = {
    "all weights, mixed precision": autotune.TrainConfig(precision="bf16", **COMMON),
    "LoRA": autotune.TrainConfig(**LORA),
    "LoRA on weights in 4 bits": autotune.TrainConfig(quantization="nf4", **LORA),
}


def main() -> None:
    """Print what each configuration takes of each card."""
    options = parse_options()
    for name in options.gpu:
        gpu = gpu_named(name)
        print(f"{gpu.name}, {gpu.memory_gib:.1f} GiB")
        for way, config in CONFIGS.items():
            cost = autotune.estimate(options.model, config=config, gpu=gpu.name, seq_len=options.seq_len)
            needed = cost.memory.device_peak_bytes
            fits = "fits" if needed <= gpu.memory_bytes else "DOES NOT FIT"
            mfu = f", MFU {cost.mfu:.0%}" if cost.mfu is not None else ""
            print(f"  {way}: {needed / 2**30:.1f} GiB, {fits}; {cost.tokens_per_second:,.0f} tokens/s{mfu}")
    print("the best configurations for a card, by component: autotune estimate --model MODEL --gpu GPU")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="llama-3-8b", help="catalogue name, directory or hub id")
    parser.add_argument("--gpu", nargs="+", default=["rtx-4090", "a100-80gb", "h100-80gb"], help="autotune gpus")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a sample (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
