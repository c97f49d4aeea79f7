"""Processor time of estimates of a 70B model, the first one and later ones, each in a process of its own.

    python benchmarks/estimate_time.py [--runs 3]

The time is that of all threads from when the libraries are imported to the end of the command. The first estimate finds
an empty `AUTOTUNE_HOME`, the later one what the first has kept there. The last line is the result as JSON: the longest
of the runs and whether it is within the aim, 8 s at first and 3 s later.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from provenance import ROOT, provenance, results_path

from autotune.value import write_text
from autotune.values.hardware import detect

MODEL = ("estimate", "--model", "llama-3-70b", "--gpu", "h100-80gb", "--quiet")
COMMANDS = {
    "one that fits": (*MODEL, "--fix", "precision=bf16,micro-batch=1,adapter=lora,quantization=nf4,checkpointing=full"),
    "one that doesn't, and what would": (*MODEL, "--fix", "precision=bf16,micro-batch=1"),
    "the ways to share 8 devices": (*MODEL, "--devices", "8"),
}
AIMS_S = {"first": 8.0, "later": 3.0}

# Exit code 5 says that nothing fits, which is an answer too.
_CHILD = """
import contextlib, io, sys, time
import peft, torch, transformers.models.llama.modeling_llama
import autotune.cost.profiler, autotune.estimates.estimate
from autotune.cli.main import main
began = time.process_time()
with contextlib.redirect_stdout(io.StringIO()):
    try:
        code = main()
    except SystemExit as end:
        code = end.code
print(time.process_time() - began)
sys.exit(0 if code in (0, None, 5) else code)
"""


def seconds(command: tuple[str, ...], home: Path) -> float:
    """Return the processor seconds of a command in a fresh process, the import of libraries left out."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *command],  # argv[0] is "-c", which nothing shows
        cwd=ROOT,
        env={**os.environ, "AUTOTUNE_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure, show and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="of each [%(default)s]")
    parser.add_argument("--out", type=Path, help="JSON file for the result (default: under benchmarks/results)")
    options = parser.parse_args()
    figures: dict[str, dict[str, object]] = {}
    for name, command in COMMANDS.items():
        found: dict[str, list[float]] = {"first": [], "later": []}
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as home:
                for times in found.values():
                    times.append(round(seconds(command, Path(home)), 2))
        within = {when: max(times) <= AIMS_S[when] for when, times in found.items()}
        figures[name] = {"command": " ".join(command), **found, "within": within}
        print(f"{name}: first {max(found['first']):.1f} s, later {max(found['later']):.1f} s of processor time")
    hardware = detect("cpu")
    path = options.out or results_path("estimate-time", hardware).with_suffix(".json")
    write_text(json.dumps({**provenance(hardware), "figures": figures}, indent=1) + "\n", path)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
