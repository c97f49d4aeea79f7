"""The answer as a table and lines."""

from io import StringIO

from answers import BASE, BIG, answer
from factories import make_measurement
from rich.console import Console

from autotune.output.table import result_table


def test_what_is_there_to_be_pasted_is_never_wrapped():
    console = Console(width=40, file=StringIO())
    path = "a/rather/long/path/to/the/place/of/best-config.json"
    console.print(result_table(answer([(BASE, 10.0), (BIG, 15.0)]), path, "runs/gpt2-20261121-020000"), crop=False)
    lines = console.file.getvalue().splitlines()
    assert f"written: {path}" in lines
    assert "all of it: runs/gpt2-20261121-020000 (autotune report runs/gpt2-20261121-020000)" in lines


def test_padding_of_the_baseline_is_told():
    def shown(share: float) -> str:
        console = Console(width=200, file=StringIO())
        searched = [(BASE, make_measurement(10.0, padding_share=share)), (BIG, 15.0)]
        console.print(result_table(answer(searched), "best-config.json", "runs/gpt2"))
        return console.file.getvalue()

    assert "note: 40% of what the baseline runs is padding, which tokens/s leaves out" in shown(0.4)
    assert "padding" not in shown(0.01)
