"""Measures every legal point of a space and writes them as a table, which `search.py` replays.

    python benchmarks/record_table.py table.jsonl --model MODEL --space space.yaml --repeat 2 seq_len=32 memory=50MiB

Further options are those of `autotune.find`, as NAME=VALUE. A point that runs out of memory rules out no other, and
each trial has its usual time limit. Points are measured in rounds, each in an order of its own, so that a drift of the
machine is not taken for the effect of a knob. The table is written after every trial.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path

from measured_searches import planned_search
from searching.tables import table_of, write_table

from autotune.values.problem import Event, Note
from autotune.values.trial import Purpose, TrialResult


def say(event: Event) -> None:
    if isinstance(event, Note):
        print(event.text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path, help="file to write")
    parser.add_argument("--model", required=True)
    parser.add_argument("--space", default="default")
    parser.add_argument("--effort", default="quick", help="decides which knobs vary (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=2, help="trials of each point (default: %(default)s)")
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="further options of autotune.find")
    given = parser.parse_intermixed_args()
    others = dict(word.split("=", 1) for word in given.options)
    options = {"model": given.model, "space": given.space, "effort": given.effort, "device": "cpu", **others}
    with planned_search(options, say) as (plan, backend, *_):
        backend.asker.ends_at = math.inf  # a search has to begin within its time, a recording takes its own
        baseline, *rest = plan.every_config()
        draw, results = random.Random(plan.workload.seed), list[TrialResult]()
        print(f"{1 + len(rest)} points, each {given.repeat} times", file=sys.stderr)
        for _ in range(given.repeat):
            draw.shuffle(rest)
            for config in (baseline, *rest):
                timeout_s, number = plan.budget.trial_timeout_s, len(results)
                request = plan.request_of(config, Purpose.SEARCH, number=number, timeout_s=timeout_s)
                results.append(backend.pool.run(request))
                write_table(table_of(plan, results), given.table)
                print(f"{number}: {results[-1].status}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
