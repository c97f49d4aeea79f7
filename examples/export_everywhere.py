"""Export: the answer of a search as scripts and files of other tools.

For whom: who trains with something else than a plain Trainer. Shows `result.export` and what each target can't say.
How long: seconds; nothing is run.

    python examples/quick_start.py t5-small
    python examples/export_everywhere.py best-config.json exported
"""

from __future__ import annotations

import argparse
from pathlib import Path

import autotune

TARGETS = ("training-args", "python", "accelerate", "accelerate-loop", "deepspeed", "fsdp", "trl")


def main() -> None:
    """Write the files of every target, each into a folder of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", help="the best-config.json of a search")
    parser.add_argument("folder", type=Path, help="where the targets' folders are made")
    options = parser.parse_args()

    result = autotune.load(options.config)
    for target in TARGETS:
        try:
            exported = result.export(target, options.folder / target)
        except autotune.AutotuneError as error:  # a target that can't train this model, or that has no use for a file
            print(f"left out: {error}")
            continue
        print(f"{target}: {', '.join(path.name for path in exported.paths)}")
        print(f"  start: {exported.launch[0]}")
        for line in exported.not_expressed:
            print(f"  not expressed: {line}")


if __name__ == "__main__":
    main()
