"""Runs a search again and again, idle and beside busy processes in turn, and counts decided answers.

    python benchmarks/first_search.py [--runs 10] [--beside 1] [-- --model gpt2 --max-time 285s]

A search is decided if its verdict is "faster" with an interval no wider than 1.3 to 1, or if it keeps the baseline and
nothing is faster by more than 10 %. The last line is the result as JSON. What a stopped run of the same day has stored
is gone on with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measured_searches import find
from provenance import provenance, results_path

from autotune.tuning_result import TuningResult
from autotune.value import write_text
from autotune.values.hardware import detect

WIDEST, LARGEST_GAIN = 1.3, 1.1


def search(arguments: list[str], beside: int) -> dict[str, Any]:
    """Return what one search told beside so many processes that compute without a pause."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(beside)]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            told, result = find(arguments, Path(scratch))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    if result is None:
        return {"beside": beside, **told}
    challenger = result.challenger.model_dump() if result.challenger else None
    return {"beside": beside, "decided": is_decided(result), "challenger": challenger, **told}


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
    parser.add_argument("--beside", type=int, default=1, help="busy processes of every second search (default: 1)")
    parser.add_argument("arguments", nargs="*", help="of `autotune find` (default: --model t5-small --effort quick)")
    options = parser.parse_args()
    arguments = options.arguments or ["--model", "t5-small", "--effort", "quick"]
    hardware = detect()
    output = results_path("first-search.json", hardware)
    output.parent.mkdir(parents=True, exist_ok=True)
    stored = json.loads(output.read_text()) if output.exists() else {"searched": arguments, "searches": []}
    if stored["searched"] != arguments:
        sys.exit(f"{output} has searches by other arguments: move it away")
    found = stored["searches"]
    for number in range(len(found), 2 * options.runs):  # in turn, so that what is stored of a stopped run has both
        origin = provenance(hardware)
        began = {"date": origin["date"], "commit": origin["commit"]}
        found.append({**began, **search(arguments, options.beside if number % 2 else 0)})
        print(f"{number}: {found[-1]}", file=sys.stderr, flush=True)
        stored = {**origin, "searched": arguments, "searches": found}
        write_text(json.dumps(stored, indent=2) + "\n", output)
    print(json.dumps(stored))


if __name__ == "__main__":
    main()
