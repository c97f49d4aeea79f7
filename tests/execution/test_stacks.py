"""Where a process stood, by what Python's faulthandler writes when it is asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autotune.execution.logtail import place_in

WRAPPED = """
Stack (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3098 in broadcast
  File "/x/torch/distributed/c10d_logger.py", line 83 in wrapper
"""
HANDED_ON = """
Stack (most recent call first):
  File "/x/torch/nn/modules/module.py", line 1790 in _call_impl
  File "/x/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/x/model.py", line 5 in forward
"""


@pytest.mark.parametrize(
    ("log", "place"),
    [
        ("", ""),
        ("Traceback (most recent call last):\n  File 'x', line 3, in y\n", ""),
        (WRAPPED, "broadcast (distributed_c10d.py:3098)"),
        (HANDED_ON, "forward (model.py:5)"),
        (WRAPPED + "a line that is printed later\n" + HANDED_ON, "forward (model.py:5)"),
        ("Stack (most recent call first):\n", ""),
    ],
)
def test_the_innermost_telling_call_of_the_last_stack_is_the_place(log, place):
    assert place_in(log) == place


def test_it_reads_what_faulthandler_really_writes():
    code = "import faulthandler\ndef nap():\n    faulthandler.dump_traceback(all_threads=False)\nnap()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert place_in(done.stderr) == "nap (<string>:3)"
