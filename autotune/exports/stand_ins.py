"""The samples that a script starts with: random ones of the size that was measured, in place of the user's own.

Values only; the scripts' templates make tensors of them. Ids come from the middle half of a vocabulary, where no model
has its special ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from autotune.exports.templating import Code
from autotune.exports.winner import Winner
from autotune.values.model import Task

# Distinct samples, which take turns; of images and recordings few, since they are large.
_TEXTS, _DENSE = 512, 8
_MASKED_SHARE = 0.15

_TEXT = Code("config.get_text_config().vocab_size")


class Inputs(NamedTuple):
    """What is fed to a model."""

    name: str
    shape: tuple[int, ...]
    distinct: int
    floats: bool = False
    vocabulary: Code | int = _TEXT  # a number, or an expression of the script's config
    ends: bool = False  # with an end of text

    @property
    def size(self) -> tuple[int, ...]:
        """Of all distinct samples together."""
        return (self.distinct, *self.shape)


class Labels(NamedTuple):
    """What is to be learnt."""

    kind: str  # inputs, masked, class or ids
    length: int = 0
    share: float = _MASKED_SHARE
    vocabulary: Code | int = _TEXT


class StandIns(NamedTuple):
    """Samples, and what to say of them."""

    input: Inputs
    labels: Labels
    about_data: str


def stand_ins(winner: Winner) -> StandIns:
    """Return what stands in for the user's samples."""
    task, length = winner.workload.task, winner.length
    if not task.takes_text:
        return _dense(winner)
    kinds = {Task.CAUSAL_LM: "inputs", Task.MASKED_LM: "masked", Task.SEQUENCE_CLASSIFICATION: "class"}
    labels = Labels(kinds.get(task, "ids"), _target_length(winner))
    inputs = Inputs("input_ids", (length,), _TEXTS, ends=True)
    return StandIns(inputs, labels, _about_texts(winner))


def _target_length(winner: Winner) -> int:
    workload = winner.workload
    mean = workload.lengths.mean_target if workload.lengths is not None else None
    return round(mean) if mean is not None else workload.target_length or workload.sequence_length


def _about_texts(winner: Winner) -> str:
    """Return how long the measured samples were, and what the user's own have to be."""
    lengths, length = winner.workload.lengths, winner.workload.sequence_length
    own = "Yours are tokenized, with `labels`"
    if lengths is None:
        return f"{own}; the measured ones all had {length} tokens."
    return (
        f"{own}, and cut at {length} tokens. The throughput was measured with {lengths.minimum} to {lengths.maximum} "
        f"tokens, {lengths.mean:.0f} on average, of {winner.workload.dataset}."
    )


def _dense(winner: Winner) -> StandIns:
    """Return images or recordings; how large they are is for the library's config to say."""
    from autotune.training.build import build_config
    from autotune.training.inputs import audio_input, image_input, labels_of

    workload, task = winner.workload, winner.workload.task
    config = build_config(workload.model, task)
    about = "Yours are made by the model's own processor, with `labels`."
    if task is Task.IMAGE_CLASSIFICATION:
        name, shape, clusters = image_input(config)
        inputs = Inputs(name, shape, _DENSE, floats=clusters is None, vocabulary=clusters or 0)
        return StandIns(inputs, Labels("class"), about)
    sound = audio_input(config, workload.sequence_length)
    inputs = Inputs(sound.name, sound.shape, _DENSE, floats=True)
    labels: dict[Task, Any] = {
        Task.AUDIO_CLASSIFICATION: Labels("class"),
        Task.SPEECH_SEQ2SEQ: Labels("ids", _target_length(winner)),
        Task.SPEECH_CTC: Labels("ids", labels_of(workload.sequence_length), vocabulary=Code("config.vocab_size")),
    }
    return StandIns(inputs, labels[task], about)
