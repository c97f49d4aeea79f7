"""TF32 that is switched on from outside: by torch's variable in the environment, and by a user's own script."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from autotune.value import read_value
from autotune.values.hardware import detect
from autotune.values.trial import TrialResult
from pack.check import Check
from pack.configurations import Configuration
from pack.models import MODELS, workload
from pack.session import Session, modules_path
from pack.stories import story_of
from pack.trials import config_of, judged, private_runner, request_of

VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
SCRIPT = Path(__file__).with_name("tf32_script.py")
LEAST_SEARCH_S = 20.0

ROWS = (
    Configuration("fp32", {"precision": "fp32"}, seen={"tf32": "^tf32$"}),
    Configuration("tf32", {"precision": "fp32", "tf32": True}, seen={"tf32": "^tf32$"}),
    Configuration("bf16", {"precision": "bf16"}),
)


def preset_tf32(session: Session) -> None:
    """Run trials with TF32 on from the start, and tune a script that switches it on itself."""
    with _environment(VARIABLE, "1"):
        hardware = detect(session.hardware.device)
        task = workload("llama", hardware, session.scratch)
        with private_runner(session, hardware) as runner:
            for row in ROWS:
                request = request_of(session.number(), config_of(row.config, hardware), task, hardware)
                found = judged(row, session.run(request, f"{row.name} under {VARIABLE}=1", runner=runner))
                session.report.check(found._replace(name=f"{VARIABLE}=1: {row.name}"))
    _tune_script(session)


def _tune_script(session: Session) -> None:
    config = session.scratch / "script-config.json"
    config.write_text(json.dumps(MODELS["tiny-llama"][session.hardware.kind]))
    folder = session.scratch / "script"
    done = session.autotune(
        "script", "--device", session.hardware.device, "--effort", "quick", "--max-trials", "1",
        "--max-time", f"{max(LEAST_SEARCH_S, session.seconds / 2):.0f}", "--run-dir", str(folder), "--json",
        "--", sys.executable, str(SCRIPT), str(config), str(session.scratch / "script-out"),
        PYTHONPATH=modules_path(), AUTOTUNE_RECORD="off", AUTOTUNE_HOME=str(session.scratch / "script-home"),
    )  # fmt: skip
    results = [read_value(TrialResult, path) for path in sorted(folder.glob("trials/*/result.json"))]
    for result in results:
        session.report.trial(story_of(session.part, result, observed_bytes=None, named="script"), result)
    bad = [r for r in results if r.measurement is None]
    told = (done.stderr.strip().splitlines() or [""])[-1]
    passed = done.returncode == 0 and bool(results) and not bad
    detail = f"{len(results)} trials, {len(bad)} not completed" + (f": {told}" if not passed else "")
    session.report.check(Check("a script that sets allow_tf32 is tuned", passed, detail))


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
