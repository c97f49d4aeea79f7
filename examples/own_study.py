"""The search in an Optuna study of your own: autotune's sampler in a plain ask-and-tell loop, on recorded trials.

For whom: who has a loop around trials already, or wants to compare samplers. Your own measurement takes the place of
the table. How long: half a minute, since nothing is trained; the model is traced once, which takes torch.

    python examples/own_study.py benchmarks/tables/llama-1m.jsonl [--seed 1]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import optuna

from autotune.search.cost_model import model_by_data_sheet
from autotune.search.sampler import CostModelSampler

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # which has the recorded tables and reads them

from searching.tables import load_table, plan_of


def main() -> None:
    """Ask for a configuration, look it up, tell what it gave, until nothing is worth another trial."""
    options = parse_options()
    table = load_table(options.table)
    plan = plan_of(table, seed=options.seed)
    recorded = {point.config: point.trials[0].measurement for point in table.points}

    sampler = CostModelSampler(plan, model_by_data_sheet(plan))
    study = optuna.create_study(sampler=sampler, direction="maximize")
    while not sampler.is_done(study):
        trial = study.ask()
        measured = recorded[sampler.suggest(trial)]
        if measured is None:
            trial.set_constraint("memory", 0.01)  # it ran out of memory: by how much isn't known
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            trial.set_constraint("memory", measured.memory.peak_bytes / plan.memory_bytes - 1)
            study.tell(trial, measured.samples_per_second)

    print(f"{len(study.trials)} of {len(table.points)} configurations tried: {sampler.conclusion}")
    print(f"{study.best_value:.1f} samples/s with {study.best_params}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", help="of benchmarks/tables")
    parser.add_argument("--seed", type=int, default=1, help="of the search (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
