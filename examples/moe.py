"""A mixture of experts: how the experts are run.

For whom: who trains Mixtral, Qwen-MoE, OLMoE and their kin. Shows the space `moe`.
How long: under five minutes, as effort "quick" has it; less with `--max-time`. The default model needs a large GPU.

    python examples/moe.py tiny/mixtral
"""

from __future__ import annotations

import argparse

import autotune


def main() -> None:
    """Search among the ways to run experts."""
    options = parse_options()
    result = autotune.find(options.model, space="moe", effort="quick", max_time=options.max_time)

    by_way: dict[str, float] = {}  # the fastest trial of each way to run experts
    for trial in result.trials:
        way = trial.config.experts_implementation or "as the model has it"
        by_way[way] = max(by_way.get(way, 0.0), trial.samples_per_second or 0.0)
    for way, rate in sorted(by_way.items(), key=lambda item: -item[1]):
        print(f"{way}: {rate:.1f} samples/s" if rate else f"{way}: no trial completed")

    print(f"{result.verdict}: {result.best.measurement.samples_per_second:.1f} samples/s", end="")
    print(f", {result.speedup.ratio:.2f} times the baseline" if result.speedup else "")
    result.save("best-config.json")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="olmoe-1b-7b", help="catalogue name, directory or hub id")
    parser.add_argument("--max-time", help="of the search, such as 2m; by default what the effort stands for")
    return parser.parse_args()


if __name__ == "__main__":
    main()
