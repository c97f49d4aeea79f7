"""What a search hands back: a value that is saved as JSON, loaded again, and turned into training arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from autotune.architecture import ModelFacts
from autotune.config import Allowance, TrainConfig, Workload
from autotune.errors import InputError
from autotune.files import write_value
from autotune.hardware import Hardware
from autotune.trial import Interval, Measurement, Prediction, TrialStatus
from autotune.values import Value

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from autotune.data import Collator, Samples

SCHEMA_VERSION: Literal[1] = 1


class Change(Value):
    """One knob that differs from the user's own training."""

    knob: str
    before: str
    after: str
    allowance: Allowance


class Contender(Value):
    """A configuration with what was measured of it."""

    config: TrainConfig
    changes: tuple[Change, ...] = Field(description="against the baseline")
    measurement: Measurement | None = Field(description="None: it has never completed a trial")
    trials: tuple[int, ...] = Field(description="numbers of the trials it was measured in")
    confirmed: bool = Field(default=False, description="measured again, in turn with the baseline")

    @property
    def allowance(self) -> Allowance:
        """The class of its deepest change."""
        return max((c.allowance for c in self.changes), key=lambda a: a.rank, default=Allowance.EXACT)


class Speedup(Value):
    """Throughput of the best over that of the reference, both measured again in turn."""

    ratio: float
    interval: Interval
    reference: str = Field(description="what the best is compared with")


class TrialSummary(Value):
    """One line of the search's story."""

    number: int | None = Field(description="None: refused without a trial")
    config: TrainConfig
    status: TrialStatus
    samples_per_second: float | None = None
    peak_bytes: int | None = None
    prediction: Prediction | None = Field(default=None, description="of rate and peak, before the trial ran")
    cause: str | None = None


class Arguments(Value):
    """The exact arguments that the best configuration was measured with."""

    training_arguments: dict[str, Any]
    model: dict[str, Any]
    quantization: dict[str, Any] | None
    adapter: dict[str, Any] | None


Verdict = Literal["faster", "no clear winner", "baseline did not complete", "unconfirmed"]


class TuningResult(Value):
    """The answer of a search."""

    schema_version: Literal[1] = SCHEMA_VERSION
    autotune_version: str
    verdict: Verdict
    workload: Workload
    facts: ModelFacts
    hardware: Hardware
    memory_budget_bytes: int
    allowance: Allowance
    baseline: Contender
    baseline_cause: str | None = Field(default=None, description="why the baseline has no measurement")
    best: Contender
    arguments: Arguments
    speedup: Speedup | None = Field(description="None: the baseline did not complete, or nothing was measured again")
    best_by_allowance: dict[Allowance, Contender] = Field(description="of each class up to the allowed one")
    runners_up: tuple[Contender, ...]
    trials: tuple[TrialSummary, ...]
    notes: tuple[str, ...] = Field(default=(), description="what the user should know, a line each")
    search_time_s: float

    def training_arguments(self, output_dir: str | Path, **overrides: Any) -> TrainingArguments:
        """Return `transformers.TrainingArguments` of the best configuration, as it was measured.

        Args:
            output_dir: Where the Trainer writes.
            **overrides: Any other argument of TrainingArguments, or another value for one.

        Raises:
            ValueError: The installed transformers or this machine refuses an argument.
        """
        from transformers import TrainingArguments

        from autotune.hardware import installed_versions
        from autotune.training_args import plan

        here = self.hardware.model_copy(update={"versions": installed_versions()})
        tuned = plan(self.best.config, self.workload, here).tuned
        return TrainingArguments(output_dir=str(output_dir), **{**tuned, **overrides})

    def model_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of `from_pretrained` or `from_config`."""
        return dict(self.arguments.model)

    def peft_config(self) -> Any | None:
        """Return the `peft.LoraConfig` to wrap the model with, or None if all weights are trained."""
        if self.arguments.adapter is None:
            return None
        from peft import LoraConfig

        return LoraConfig(**self.arguments.adapter)

    def build_model(self) -> PreTrainedModel:
        """Return the model with random weights on the device, as a trial builds it: to try a result out.

        Raises:
            InputError: The installed transformers can't build it.
        """
        from autotune.models import build_model

        kwargs = self.arguments.model
        return build_model(
            self.workload.model,
            self.workload.task,
            dtype=kwargs["dtype"],
            attn_implementation=kwargs.get("attn_implementation"),
            device=self.hardware.kind,
        )

    def prepare_model(self, model: Any) -> Any:
        """Return `model` as the trials trained it: the adapter put on, if there is one, and the loss normalised."""
        from autotune.adapters import prepare_model

        return prepare_model(model, self.arguments.adapter)

    def training_data(self, samples: int, *, directory: str | Path | None = None) -> tuple[Samples, Collator]:
        """Return a dataset of `samples` samples such as the trials trained on, and what makes batches of them.

        Args:
            samples: Length of the dataset; the data start again from their beginning when they end.
            directory: Only for data from a file: where their tokens are, such as `data` of a run directory, or are
                to be put.

        Raises:
            InputError: The file that the search read can't be read any more.
            RunDirectoryError: `directory` can't be written.
        """
        from autotune.corpus import TOKENS
        from autotune.data import prepare, training_data
        from autotune.models import build_config

        where = Path(directory) if directory is not None else None
        if self.workload.dataset is not None and where is not None and not (where / TOKENS).exists():
            prepare(self.workload, where)
        config = build_config(self.workload.model, self.workload.task)
        return training_data(self.workload, config, samples=samples, directory=where)

    def save(self, path: str | Path) -> None:
        """Write the result as JSON.

        Raises:
            OSError: The file can't be written.
        """
        write_value(self, Path(path))


def load(path: str | Path) -> TuningResult:
    """Return the result saved in `path`.

    Raises:
        InputError: The file is missing, not JSON of a result, or of another schema version.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    try:
        return TuningResult.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"]) or "file"
        raise InputError(
            f"{path}: not a result of autotune (schema {SCHEMA_VERSION}): {where}: {first['msg']}"
        ) from None
