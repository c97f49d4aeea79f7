"""Your own data: tune for the lengths that your texts really have.

For whom: who trains on texts of varied length. Shows what padding costs, and whether grouping by length or packing
saves it. How long: under five minutes, as effort "quick" has it; less with `--max-time`.

    python examples/own_data.py tiny/texts.json --model tiny/llama
"""

from __future__ import annotations

import argparse

import autotune
from autotune.cost.lengths import padding_share


def main() -> None:
    """Search on the texts of a file, and say what they are like."""
    options = parse_options()
    result = autotune.find(
        options.model,
        data=options.data,  # JSONL, CSV, Parquet or text; text_field= names the column if it isn't called `text`
        seq_len=options.seq_len,
        effort="quick",
        max_time=options.max_time,
    )

    lengths = result.workload.lengths
    print(f"{lengths.samples} texts of {lengths.minimum} to {lengths.maximum} tokens, {lengths.mean:.0f} on average")
    for name, contender in {"baseline": result.baseline, "best": result.best}.items():
        if contender.measurement is not None:
            padding = f"about {padding_share(result.workload, contender.config):.0%} of the positions are padding"
            print(f"{name}: {contender.tokens_per_second:,.0f} real tokens/s, {padding}")
    for change in result.best.changes:
        print(f"  {change.knob}: {change.before} -> {change.after}")
    if result.best.config.packing:
        print("packed samples need data_collator=transformers.DataCollatorWithFlattening() in your Trainer")

    result.save("best-config.json")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", help="file of texts; make_texts.py and make_tiny.py write some")
    parser.add_argument("--model", default="gpt2", help="catalogue name, directory or hub id (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, help="longer texts are cut to so many tokens")
    parser.add_argument("--max-time", help="of the search, such as 2m; by default what the effort stands for")
    return parser.parse_args()


if __name__ == "__main__":
    main()
