"""Finds out, in a child process, what the search must know of a workload: the model's classes and the data's lengths.

Entered by `launch` like a trial. It builds the model on the meta device, so nothing is allocated, and tokenizes real
data once for all trials.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from autotune.errors import AutotuneError, InputError
from autotune.training.baseline import unknown_argument
from autotune.value import read_value, write_value
from autotune.values.config import Workload
from autotune.values.trial import DescribeRequest, Description, Refusal

ENTRY = "autotune.execution.describe:run_describe"
ANSWER_FILE = "description.json"


def run_describe(directory: Path) -> None:
    """Answer the request in `directory`; tokenized data go to the directory `data` beside it."""
    request = read_value(DescribeRequest, directory / "request.json")
    try:
        answer: Description | Refusal = _describe(request, directory)
    except AutotuneError as error:
        answer = Refusal(error=type(error).__name__, message=str(error))
    write_value(answer, directory / ANSWER_FILE)


def _describe(request: DescribeRequest, directory: Path) -> Description:
    from autotune.training.build import describe
    from autotune.training.dataset import prepare

    workload, data_directory = request.workload, directory.parent / "data"
    if workload.own_code is not None:
        from autotune.execution.user_facts import describe_own

        return describe_own(workload.own_code, directory, data_directory)
    _check_arguments(workload)
    facts = describe(workload.model, workload.task)
    corpus = prepare(workload, data_directory)
    if corpus is None:
        return Description(facts=facts)
    lengths = corpus.lengths
    profile = (
        f"{lengths.samples:,} samples of {lengths.minimum} to {lengths.maximum} tokens, {lengths.mean:.0f} on average "
        f"(tokenizer: {corpus.tokenizer})"
    )
    return Description(facts=facts, lengths=lengths, notes=(profile, *corpus.notes))


def _check_arguments(workload: Workload) -> None:
    from transformers import TrainingArguments

    known = frozenset(field.name for field in dataclasses.fields(TrainingArguments))
    problem = unknown_argument(workload.fixed_arguments, known)
    if problem is not None:
        raise InputError(problem)
