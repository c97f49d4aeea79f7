"""Runs a newcomer's first search again and again, idle and beside a busy process, and counts decided answers.

    python benchmarks/first_search.py --runs 10 --beside 0.25

A search is decided if its verdict is "faster" with an interval no wider than 1.3 to 1, or if it keeps the baseline and
nothing is faster by more than 10 %. Each search has a record of its own and runs the command of the README. The last
line is the result as JSON. What a stopped run of the same day has stored is gone on with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measured_searches import told
from provenance import provenance, results_path

from autotune.tuning_result import TuningResult, load
from autotune.value import write_text
from autotune.values.hardware import detect

COMMAND = ("find", "--model", "t5-small", "--effort", "quick")

WIDEST, LARGEST_GAIN = 1.3, 1.1

# Computes for a share of each tenth of a second on one core.
BUSY = """
import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + share / 10
    while time.perf_counter() < end:
        pass
    time.sleep((1 - share) / 10)
"""


def search(share: float) -> dict[str, Any]:
    """Return what one search told beside processes that take this share of all cores."""
    busy_cores = share * len(os.sched_getaffinity(0))
    whole, part = divmod(busy_cores, 1)
    shares = [1.0] * int(whole) + ([part] if part else [])
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "AUTOTUNE_HOME": str(Path(scratch) / "home")}
        burners = [subprocess.Popen([sys.executable, "-c", BUSY, str(s)]) for s in shares]
        began = time.monotonic()
        command = [sys.executable, "-m", "autotune", *COMMAND, "--run-dir", str(Path(scratch) / "run")]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
        took_s = time.monotonic() - began
        if done.returncode:
            return {"beside": share, "took_s": took_s, "exit_code": done.returncode, "error": done.stderr[-500:]}
        return {"beside": share, "took_s": round(took_s, 1), **kept(load(Path(scratch) / "run" / "best-config.json"))}


def kept(result: TuningResult) -> dict[str, Any]:
    shares = result.spent.shares() if result.spent is not None else {}
    return {
        **told(result),
        "decided": is_decided(result),
        "challenger": result.challenger.model_dump() if result.challenger else None,
        "soaked": result.soaked is not None,
        "measured_share": shares.get("measured steps", 0.0),
        "shares": {name: round(share, 3) for name, share in shares.items()},
    }


def is_decided(result: TuningResult) -> bool:
    """Whether the answer says that something is faster, or that nothing is by more than a tenth."""
    if result.verdict == "faster" and result.speedup is not None:
        return result.speedup.interval.high <= WIDEST * result.speedup.interval.low
    if result.verdict != "no_clear_winner":
        return False
    challenger = result.challenger
    return challenger is None or challenger.interval.high <= LARGEST_GAIN


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10, help="searches of each kind (default: %(default)s)")
    parser.add_argument("--beside", type=float, default=0.25, help="share of the cores (default: %(default)s)")
    options = parser.parse_args()
    hardware = detect("cpu")
    output = results_path("first-search.json", hardware)
    output.parent.mkdir(parents=True, exist_ok=True)
    searched = "autotune " + " ".join(COMMAND)
    stored = json.loads(output.read_text()) if output.exists() else {"searched": searched, "searches": []}
    if stored["searched"] != searched:
        sys.exit(f"{output} has searches by another command: move it away")
    found = stored["searches"]
    for number in range(len(found), 2 * options.runs):  # in turn, so that what is stored of a stopped run has both
        origin = provenance(hardware)
        began = {"date": origin["date"], "commit": origin["commit"]}
        found.append({**began, **search(options.beside if number % 2 else 0.0)})
        print(f"{number}: {found[-1]}", file=sys.stderr, flush=True)
        stored = {**origin, "searched": searched, "searches": found}
        write_text(json.dumps(stored, indent=2) + "\n", output)
    print(json.dumps(stored))


if __name__ == "__main__":
    main()
