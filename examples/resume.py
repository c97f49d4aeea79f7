"""Resume: a search that was killed goes on where it was.

For whom: who searches where jobs are taken away: Slurm, spot instances, a laptop. Shows `autotune resume` after
`kill -9`. How long: under five minutes, as effort "quick" has it; less with `--max-time`.

    python examples/resume.py [t5-small] [--run-dir runs/resumed]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import autotune


def main() -> None:
    """Start a search, kill it after some trials, and resume it."""
    options = parse_options()
    search = [sys.executable, "-m", "autotune", "find", "--model", options.model, "--effort", "quick"]
    if options.max_time is not None:
        search += ["--max-time", options.max_time]
    process = subprocess.Popen([*search, "--run-dir", options.run_dir])
    while len(finished := sorted(options.run_dir.glob("trials/*/result.json"))) < options.kill_after:
        if process.poll() is not None:
            sys.exit(f"the search ended by itself, with exit code {process.returncode}")
        time.sleep(0.1)
    process.kill()  # no warning, nothing tidied up
    process.wait()
    written = {path: path.stat().st_mtime_ns for path in finished}
    print(f"killed after {len(written)} finished trials")

    result = autotune.resume(options.run_dir)
    untouched = sum(path.stat().st_mtime_ns == moment for path, moment in written.items())
    print(f"resumed: {len(result.trials)} trials in all, {untouched} of the first {len(written)} as they were")
    print(f"{result.verdict}: {result.best.measurement.samples_per_second:.1f} samples/s")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="t5-small", help="catalogue name, directory or hub id")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/resumed"), help="default: %(default)s")
    parser.add_argument("--kill-after", type=int, default=2, help="finished trials (default: %(default)s)")
    parser.add_argument("--max-time", help="of the search, such as 2m; by default what the effort stands for")
    return parser.parse_args()


if __name__ == "__main__":
    main()
