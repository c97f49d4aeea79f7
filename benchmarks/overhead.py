"""Says where the seconds of a search go, and holds them against two targets.

    python benchmarks/overhead.py --model distilbert-base-uncased --seq-len 64
    python benchmarks/overhead.py --model benchmarks/tables/models/llama-3m --effort standard

Runs a real search and reads what it recorded: start-up of the command line, planning, importing the libraries (once,
in the launcher), describing and tracing the model; of each trial its process, model, data, Trainer, first step,
warm-up, measured steps and end; and what lies between trials. The targets: a trial after the first takes at most 1 s
beside its steps (models under 100M parameters), and at most 15 % of a search lie outside of steps and checks.

On a busy machine everything takes longer. So each overhead is also given as it would be on a free core: less the share
of its time that the training thread of the same trial was seen waiting for one. The last line is the result as JSON.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measured_searches import find, parser_of
from provenance import keep

from autotune.tuning_result import TuningResult
from autotune.values.hardware import detect
from autotune.values.problem import Event, TrialEnded
from autotune.values.trial import TrialResult

MOST_TRIAL_S = 1.0
MOST_SHARE = 0.15
SMALL_PARAMETERS = 100_000_000


def main() -> None:
    options = parser_of(__doc__, usual={"model": "distilbert-base-uncased"}).parse_args()
    hardware = detect(options.device)
    trials: list[TrialResult] = []

    def observer(event: Event) -> None:
        if isinstance(event, TrialEnded):
            trials.append(event.result)

    with tempfile.TemporaryDirectory() as scratch:
        started = time.monotonic()
        result = find(options, Path(scratch), observer=observer)
        find_s = time.monotonic() - started
    found = {
        "model": result.workload.model.name,
        "parameters": result.facts.parameters,
        "effort": options.effort,
        "command_line": command_line(),
        "find_s": find_s,
        **summary(trials, result),
    }
    for line in told(found):
        print(line, file=sys.stderr)
    keep(f"overhead-{result.workload.model.name}", hardware, found, options.out)


def command_line() -> dict[str, float]:
    """Return the seconds, wall and processor, until the command line has shown its help; the best of three."""
    found = []
    for _ in range(3):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([sys.executable, "-m", "autotune", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append((time.monotonic() - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return {"wall_s": min(wall for wall, _ in found), "processor_s": min(processor for _, processor in found)}


def summary(trials: list[TrialResult], result: TuningResult) -> dict[str, Any]:
    """Return where the time went, by trial and in all, and how the targets were met."""
    rows = [row(trial) for trial in trials]
    later = [r["overhead_s"] for r in rows[1:] if r["overhead_s"] is not None]
    spent, typical_s = result.spent, statistics.median(later) if later else None
    shares, is_small = spent.shares() if spent else {}, result.facts.parameters <= SMALL_PARAMETERS
    outside = sum(shares.get(part, 0.0) for part in ("setting trials up", "starting the search", "between trials"))
    return {
        "spent": spent.model_dump() if spent else None,
        "shares": shares or None,
        "outside_share": outside if spent else None,
        "trial_overhead_s": typical_s,
        "targets": {
            "trial": typical_s <= MOST_TRIAL_S if typical_s is not None and is_small else None,
            "search": None if spent is None else outside <= MOST_SHARE,
        },
        "disturbances": result.disturbances,
        "trials": rows,
    }


def row(trial: TrialResult) -> dict[str, Any]:
    phases = trial.outcome.phases
    return {
        "number": trial.request.number,
        "purpose": trial.request.purpose,
        "status": trial.status,
        "duration_s": trial.duration_s,
        "overhead_s": trial.overhead_s,
        "process_s": None if phases is None else trial.duration_s - sum(phases.model_dump().values()),
        "phases": phases.model_dump() if phases else None,
    }


def told(document: dict[str, Any]) -> list[str]:
    lines = [f"command line: {document['command_line']['wall_s']:.2f} s until its help is shown"]
    if document["spent"] is not None:
        starting = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in document["spent"]["starting"].items())
        lines += [f"starting: {starting}", *(f"{share:6.1%} {what}" for what, share in document["shares"].items())]
        lines.append(f"{document['outside_share']:.1%} outside of steps and checks (target: {MOST_SHARE:.0%})")
    if document["trial_overhead_s"] is not None:
        lines.append(f"{document['trial_overhead_s']:.2f} s a trial beside its steps (target: {MOST_TRIAL_S} s)")
    return lines


if __name__ == "__main__":
    main()
