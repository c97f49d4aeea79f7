"""Searches from Python instead of the command line: find, look at the answer, save it.

    python examples/python_api.py [--model t5-small] [--output best-config.json]

Without a model it writes a tiny Llama of its own, so that it runs anywhere in a minute.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import autotune

TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def main() -> None:
    """Search, show what was found, and save it."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as scratch:
        result = autotune.find(
            options.model or tiny_model(Path(scratch) / "tiny-llama"),
            seq_len=64,
            allow="numerics",  # other rounding is fine, another optimizer or method is not
            effort="quick",
            max_trials=2,
            max_time="1m",
            run_dir=Path(scratch) / "run",
        )

    print(f"{result.verdict}: {result.best.measurement.samples_per_second:.1f} samples/s", end="")
    print(f", {result.speedup.ratio:.2f} times the baseline" if result.speedup else "")
    for change in result.best.changes:
        print(f"  {change.knob}: {change.before} -> {change.after}")
    for trial in result.trials:
        print(f"  trial {trial.number}: {trial.status}", trial.cause or "")

    result.save(options.output)
    print(f"saved: {options.output}")


def tiny_model(directory: Path) -> str:
    """Write the configuration of a tiny model; its weights are never needed."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))
    return str(directory)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="catalogue name, directory or hub id (default: a tiny Llama)")
    parser.add_argument("--output", type=Path, default=Path("best-config.json"), help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
