"""Quick start: search from Python, look at the answer, keep it.

For whom: everybody; the first thing to run. Shows `autotune.find` and what its result tells.
How long: under five minutes on two CPU cores, as effort "quick" has it.

    python examples/quick_start.py [t5-small] [--output best-config.json]
"""

from __future__ import annotations

import argparse

import autotune


def main() -> None:
    """Search, show what was found, and save it."""
    options = parse_options()
    result = autotune.find(
        options.model,
        allow="numerics",  # other rounding is fine, another optimizer or method is not
        effort="quick",
        max_trials=options.max_trials,
        max_time=options.max_time,
    )

    measured = result.best.measurement
    print(f"{result.verdict}: {measured.samples_per_second:.1f} samples/s", end="")
    print(f", {result.speedup.ratio:.2f} times the baseline" if result.speedup else "")
    print(f"peak memory {measured.memory.peak_bytes / 2**20:,.0f} MiB")
    for change in result.best.changes:
        print(f"  {change.knob}: {change.before} -> {change.after}")
    for trial in result.trials:
        print(f"  trial {trial.number}: {trial.status}", trial.cause or "")

    result.save(options.output)
    print(f"saved: {options.output}; train with it: examples/train_with_result.py")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="t5-small", help="catalogue name, directory or hub id")
    parser.add_argument("--max-trials", type=int, help="of the search; by default what the effort stands for")
    parser.add_argument("--max-time", help="of the search, such as 2m; by default what the effort stands for")
    parser.add_argument("--output", default="best-config.json", help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
