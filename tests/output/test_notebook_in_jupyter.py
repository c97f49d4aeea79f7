"""A search in a real notebook, executed by a real kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the kernel's own warnings
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]


def executed(*cells: str, folder: Path):
    """Return the outputs of the last cell of a notebook."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}})
    return client.execute().cells[-1].outputs


def test_a_loop_written_in_a_notebook_is_tuned(tmp_path, monkeypatch):
    """What is defined in a cell belongs to no module that a trial could import."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    define = """
import time
PAUSES = {"fp32": 0.02, "bf16": 0.005}

def make_step(config, accumulation_steps):
    return lambda: time.sleep(accumulation_steps * PAUSES[config.precision])
"""
    search = """
import autotune
result = autotune.find(step=make_step, knobs={"precision": ["fp32", "bf16"]}, global_batch=8, effort="quick",
                       device="cpu", run_dir="run")
"""
    (shown,) = executed(define, search, "print(result.best.config.precision)", folder=tmp_path)
    assert shown["text"].strip() == "bf16"
