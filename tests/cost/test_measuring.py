"""A trace's operators can be run again by their calls at any micro-batch, optimizers stepped, products measured."""

import json
import os
import subprocess
import sys

import pytest
import torch
from profiles import make_family, make_group

from autotune.cost.family import Shape
from autotune.cost.measuring import timings_of
from autotune.cost.meta import bytes_of, runnable, written
from autotune.cost.profile import VIEW
from autotune.cost.profiler import profile
from autotune.cost.rates import OperatorRequest
from autotune.cost.time import ADDING, CLIPPING, at, parameter_key
from autotune.values.estimate import Timings
from autotune.values.hardware import MMAP_THRESHOLD, OWN_MMAP_THRESHOLD
from autotune.values.model import Task

CPU = torch.device("cpu")
KNOWN = Timings(operator_s=1e-6, micro_step_s=1e-3)


def asked(*calls: str, **fields) -> OperatorRequest:
    defaults = {"device": "cpu", "limit_s": 60, "most_bytes": 1e9, "known": KNOWN}
    return OperatorRequest(calls=calls, **{**defaults, **fields})


# Prints the pages that one run of an operator of 4 MiB touched for the first time, in the middle of being measured.
NEW_PAGES = """
import ctypes, pathlib, resource, sys
from autotune.cost import measuring

keep = measuring.keep_freed_blocks

def kept():  # and never given back: free memory at the heap's end is, if importing has left much there
    keep()
    ctypes.CDLL(None).mallopt(-1, 2**31 - 1)

measuring.keep_freed_blocks = kept
measuring._ROUNDS = 101  # the first few may take a block of new pages each, before freed ones are found again

block_s = measuring.block_s
seen = []

def counted(device, work, runs):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds = block_s(device, work, runs)
    seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return seconds

measuring.block_s = counted
measuring.run_measure(pathlib.Path(sys.argv[1]))
print(sorted(seen)[len(seen) // 2])
"""


def test_a_call_is_run_again_with_tensors_of_its_sizes_strides_and_types():
    args = (torch.zeros(4), torch.zeros(2, 3), torch.zeros(4, 3).t())
    call = written("aten.addmm.default", args, {"beta": 2})
    assert bytes_of(call) == 4 * (4 + 6 + 12)
    assert runnable(call, CPU)().shape == (2, 4)
    assert json.loads(call)[1][2]["s"] == [1, 3]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_operator_of_a_small_model_can_be_measured(spec_of, attention):
    traced = profile(spec_of("llama"), make_family(attn_implementation=attention), Shape(task=Task.CAUSAL_LM, length=8))
    calls = {at(work.call, 1) for work in traced.work if work.kind != VIEW}
    assert timings_of(asked(*calls)).operators.keys() == calls


def test_operators_run_with_the_memory_that_others_have_freed_as_in_a_training(tmp_path):
    """A trial on a CPU starts with each block mapped anew, so that its memory can be read, and ends that in time."""
    call = written("aten.neg.default", (torch.zeros(1 << 20),), {})
    (tmp_path / "request.json").write_text(asked(call).model_dump_json())
    found = subprocess.run(
        [sys.executable, "-c", NEW_PAGES, tmp_path],
        env={**os.environ, MMAP_THRESHOLD: OWN_MMAP_THRESHOLD}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(found.stdout) < 10, "of 1,024 pages"


def test_an_operator_that_has_too_many_bytes_is_left_out():
    call = written("aten.neg.default", (torch.zeros(1000),), {})
    assert timings_of(asked(call, most_bytes=1000)).operators == {}


def test_optimizers_clipping_and_adding_are_measured_by_parameter():
    group = make_group(8, 8)
    found = timings_of(asked(parameters=(group,), optimizers=("sgd", "adafactor"))).optimizers
    assert found.keys() == {parameter_key(what, group) for what in ("sgd", "adafactor", CLIPPING, ADDING)}


def test_the_time_beside_operators_is_measured_once():
    found = timings_of(asked(known=None))
    assert min(found.operator_s, found.micro_step_s) >= 0
    assert timings_of(asked()) == KNOWN
