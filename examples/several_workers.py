"""Several workers: trials of one search side by side.

For whom: who has several GPUs and trains on one of them at a time. Shows `workers=` and which device each
trial ran on. How long: under five minutes, as effort "quick" has it; less with `--max-time`.

    python examples/several_workers.py [gpt2] [--workers 2]
"""

from __future__ import annotations

import argparse
from collections import Counter

import autotune
from autotune.values.problem import Event, Note, TrialEnded


def main() -> None:
    """Search with several workers, and tell who did what."""
    options = parse_options()
    places: Counter[str] = Counter()

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded):
            places[event.result.place] += 1
            print(f"trial {event.result.request.number} on {event.result.place}: {event.result.status}", flush=True)
        elif isinstance(event, Note):
            print(f"note: {event.text}", flush=True)

    # Each worker has a GPU of its own.
    result = autotune.find(
        options.model,
        workers=options.workers,
        effort="quick",
        max_time=options.max_time,
        observer=listen,
    )
    print(", ".join(f"{place}: {count} trials" for place, count in sorted(places.items())))
    print(f"{result.verdict}: {result.best.measurement.samples_per_second:.1f} samples/s")
    result.save("best-config.json")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="gpt2", help="catalogue name, directory or hub id")
    parser.add_argument("--workers", type=int, default=2, help="trials at once (default: %(default)s)")
    parser.add_argument("--max-time", help="of the search, such as 2m; by default what the effort stands for")
    return parser.parse_args()


if __name__ == "__main__":
    main()
