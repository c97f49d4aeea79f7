"""The lasting record as tables."""

from io import StringIO

from factories import make_config
from recorded_searches import recorded_search, recorded_trial
from rich.console import Console

from autotune.output.history_table import trials_table
from autotune.values.config import Parallelism


def test_what_differs_from_the_baseline_is_named_by_knobs():
    spread = make_config(16, adapter={"rank": 4}, parallelism=Parallelism(world_size=2, sharding="zero_3"))
    console = Console(width=200, file=StringIO())
    console.print(trials_table([recorded_search(recorded_trial(spread))]))
    shown = console.file.getvalue()
    assert "micro-batch 16, adapter lora, devices 2, sharding zero_3 " in shown
    assert " nothing " in shown
