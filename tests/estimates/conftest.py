"""An estimate of the tiny Llama, whose traces are made once."""

import re

import pytest
import traced_once

from autotune.estimates.estimate import report
from autotune.estimates.report import Report
from autotune.planning.options import EstimateOptions, options_of

GPU = "rtx-3070"  # 7.8 GiB


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch):
    monkeypatch.setattr("autotune.cost.profiler.profile", traced_once.profile)


@pytest.fixture
def fix_in():
    """Return a function that finds the configuration that a text names, as it can be pasted."""

    def read(text: str) -> dict[str, str]:
        (named,) = re.findall(r"with --fix (\S+) ", text)
        return dict(pair.split("=") for pair in named.split(","))

    return read


@pytest.fixture
def estimated(tiny_llama):
    """Return a function that reports on the tiny Llama, unless another model is named."""

    def make(**options) -> Report:
        return report(options_of(EstimateOptions, {"model": str(tiny_llama), "seq_len": 128, "gpu": GPU, **options}))

    return make
