"""Tunes the scripts of `examples/scripts` as they stand, trains with the answers, and compares with what was promised.

    python benchmarks/unchanged_scripts.py [--only run_glue] [--runs 5]

For each script: `autotune script -- python SCRIPT ...` searches; then `autotune script --apply` runs the script, still
unchanged, to its end, several times, each in a fresh process. Its steady throughput stands beside the promise and the
interval into which the next run should fall. The models are those of `examples/make_tiny.py`, wider and deeper. The
last line is the result as JSON. `sft` needs `pip install trl`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import ROOT, provenance, results_path
from repeat import finite

import autotune
from autotune.integrations.callback import FILE_NAME
from autotune.integrations.promise import Production
from autotune.value import write_text
from autotune.values.hardware import detect

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 1800.0

# Each script's own arguments, as its users would write them; "tiny" is the folder of make_tiny.py.
ARGUMENTS = {
    "run_glue": "--model_name_or_path tiny/bert --train_file tiny/pairs-train.csv --do_train",
    "run_clm": "--model_name_or_path tiny/llama --train_file tiny/texts.json --block_size 128 --do_train",
    "sft": "--model_name_or_path tiny/llama --train_file tiny/chats.json --max_length 128 --use_cpu True",
}
COMMON = "--output_dir out --report_to none --disable_tqdm True --logging_steps 1000 --save_strategy no"


def main() -> None:
    """Measure, print and write what the command line asks for."""
    options = parse_options()
    hardware = detect("auto")
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["AUTOTUNE_HOME"] = str(folder / "home")
        os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")
        sizes = ["--width", str(options.width), "--layers", str(options.layers)]
        run([sys.executable, str(EXAMPLES / "make_tiny.py"), "tiny", *sizes], folder)
        for name in options.only:
            found[name] = compare(name, folder, options)
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    document = {**provenance(hardware), "load_average": os.getloadavg(), "scripts": found}
    output = options.out or results_path("unchanged-scripts", hardware).with_suffix(".json")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(json.dumps(document, indent=2) + "\n", output)
    print(json.dumps(document))


def compare(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tune a script, train with the answer `options.runs` times, and return both throughputs."""
    command = ["python", str(EXAMPLES / "scripts" / f"{name}.py"), *ARGUMENTS[name].split(), *COMMON.split()]
    command += ["--max_steps", str(options.steps)]
    tune = [sys.executable, "-m", "autotune", "script"]
    answer = folder / f"{name}.json"
    run([*tune, "--effort", options.effort, "--run-dir", f"run-{name}", "-o", str(answer), "--", *command], folder)
    for _ in range(options.runs):
        run([*tune, "--apply", str(answer), "--", *command], folder)
    lines = (folder / "out" / FILE_NAME).read_text().splitlines()[-options.runs :]
    result, trainings = autotune.load(answer), [Production.model_validate_json(line) for line in lines]
    promise = trainings[0].promise
    rates = [training.samples_per_second or math.nan for training in trainings]
    return {
        "command": " ".join(command).replace(f"{ROOT}/", ""),
        "verdict": result.verdict,
        "changes": {change.knob: f"{change.before} -> {change.after}" for change in result.best.changes},
        "speedup": result.speedup.ratio if result.speedup else None,
        "confirmed": result.best.confirmed,
        "promised": promise.samples_per_second,
        "promised_interval": finite(promise.interval),
        "rates": rates,
        "ratio": math.exp(statistics.fmean(math.log(rate / promise.samples_per_second) for rate in rates)),
        "inside": sum(promise.interval.low <= rate <= promise.interval.high for rate in rates),
        "slower": sum(training.is_slower for training in trainings),
        "reasons": sorted({reason for training in trainings for reason in training.reasons}),
    }


def run(command: list[str], folder: Path) -> None:
    """Run a command.

    Raises:
        RuntimeError: It failed.
    """
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, "PYTHONPATH": path}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    has_trl = importlib.util.find_spec("trl") is not None
    here = [name for name in ARGUMENTS if name != "sft" or has_trl]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=ARGUMENTS, default=here, help="scripts (default: all that can run)"
    )
    parser.add_argument("--effort", default="quick", help="of the search (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="trainings with each answer (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of each training (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the models (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the models (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file of the result (default: in benchmarks/results)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
