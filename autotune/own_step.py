"""A training loop of the user's own, as a value: what a trial needs to run its steps. See `own_loop` for the rest.

The function itself lies pickled in the folder `data` of the search's directory, where every trial of the search and of
`autotune explain` finds it.
"""

from __future__ import annotations

from pydantic import Field

from autotune.values import Value

STEP_FILE = "own-step.pkl"

# The argument that tells the function how many micro-batches a step has, if it takes it.
ACCUMULATION = "accumulation_steps"

# What a knob can be set to, as in a search space.
Choices = tuple[bool | int | float | str | None, ...]


class OwnStep(Value):
    """A function that sets up training for a configuration and returns what runs one optimizer step."""

    name: str = Field(description="of the function, for people")
    takes_accumulation: bool = Field(description=f"whether it has an argument {ACCUMULATION}")
    knobs: dict[str, Choices | None] = Field(
        description="fields of TrainConfig that it honours, with their choices (None: the usual); empty: the space's"
    )
    directory: str = Field(description="the working directory that it expects")
    sha256: str = Field(default="", description=f"digest of {STEP_FILE}, in place of which nothing else is loaded")
    search_path: tuple[str, ...] = Field(description="where its modules are imported from")
