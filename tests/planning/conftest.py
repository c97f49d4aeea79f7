"""Arguments in a file, and a machine of several devices."""

import json

import pytest
from factories import make_hardware


@pytest.fixture
def arguments(tmp_path):
    """Return a function that writes TrainingArguments to a file and gives its name."""

    def write(**document) -> str:
        (tmp_path / "args.json").write_text(json.dumps(document))
        return str(tmp_path / "args.json")

    return write


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr("autotune.values.hardware.detect", lambda device: make_hardware(cores=8, count=1))
