"""What a search hands back: a value that is saved as JSON, loaded again, and turned into training arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from autotune.architecture import ModelFacts
from autotune.checks import LossVerdict, SkewedRouting, Soaked
from autotune.complaints import complaint
from autotune.config import Allowance, TrainConfig, Workload
from autotune.errors import InputError
from autotune.files import write_value
from autotune.hardware import Hardware
from autotune.objective import Objective
from autotune.spending import Spent
from autotune.trial import Interval, Measurement, Prediction, Purpose, TrialStatus
from autotune.values import Value

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from autotune.batches import Collator
    from autotune.data import Samples
    from autotune.exports.targets import Exported

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
    purpose: Purpose | None = Field(default=None, description="None: refused without a trial")
    depths: dict[str, int] = Field(default_factory=dict, description="of a probe: the layers that were run")
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


class Compilation(Value):
    """What the best configuration's compiler costs and when it is won back."""

    cold_start_s: float = Field(description="of the first step over the others, with nothing compiled before")
    break_even_steps: int | None = Field(description="optimizer steps until the baseline is overtaken; None: never")


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
    objective: Objective = Objective()
    compilation: Compilation | None = Field(default=None, description="None: the best isn't compiled, or not confirmed")
    soaked: Soaked | None = Field(default=None, description="what the best was seen to have memory for beside training")
    skewed_routing: SkewedRouting | None = Field(default=None, description="of a best that has experts")
    loss_check: LossVerdict | None = Field(default=None, description="the best's losses against the baseline's")
    proof_notes: tuple[str, ...] = Field(default=(), description="who failed a check, what of the best was not checked")
    speedup: Speedup | None = Field(description="None: the baseline did not complete, or nothing was measured again")
    kept_because: str | None = Field(
        default=None, description="measurements for which an unconfirmed leader isn't best"
    )
    best_by_allowance: dict[Allowance, Contender] = Field(description="of each class up to the allowed one")
    runners_up: tuple[Contender, ...]
    trials: tuple[TrialSummary, ...]
    probed: str | None = Field(default=None, description="how far off shallow probes were; None: without them")
    outshone: str | None = Field(default=None, description="why a trial that was faster isn't the best; None: none was")
    notes: tuple[str, ...] = Field(default=(), description="what the user should know, a line each")
    disturbances: tuple[str, ...] = Field(default=(), description="what went on beside the trials, a line each")
    search_time_s: float
    spent: Spent | None = Field(default=None, description="where the time went; None: not recorded then")

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
        tuned = {**plan(self.best.config, self.workload, here).tuned, **(self.soaked.arguments if self.soaked else {})}
        return TrainingArguments(output_dir=str(output_dir), **{**tuned, **overrides})

    @property
    def launch_commands(self) -> tuple[str, ...]:
        """The command lines that start training with the best configuration; the files they name: `save_files`."""
        from autotune import launch_files

        return launch_files.commands(launch_files.measured_of(self))

    def file_text(self, name: str) -> str:
        """Return what a file of a launcher or a library holds: 'training-args', 'accelerate', 'fsdp' or 'deepspeed'.

        Raises:
            InputError: The best configuration has nothing for it.
        """
        from autotune import launch_files

        return launch_files.text_of(name, launch_files.measured_of(self))

    def save_files(self, directory: str | Path) -> tuple[Path, ...]:
        """Write the files of launchers and libraries for the best configuration, and the commands; return their paths.

        Raises:
            OSError: The directory can't be written.
        """
        from autotune import launch_files

        return launch_files.save(launch_files.measured_of(self), Path(directory))

    def export(self, target: str, directory: str | Path) -> Exported:
        """Write the best configuration for another tool: the targets of `autotune export --to`, or 'all' of them.

        Returns:
            The paths, the command lines that use them, and what of the configuration the target can't express.

        Raises:
            InputError: There is no such target, or it can't train this.
            OSError: The directory can't be written.
        """
        from autotune.exports import targets

        return targets.save(self, target, Path(directory))

    def model_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of `from_pretrained`; of `from_config` too, but for quantized base weights."""
        if self.arguments.quantization is None:
            return dict(self.arguments.model)
        from transformers import BitsAndBytesConfig

        return {**self.arguments.model, "quantization_config": BitsAndBytesConfig(**self.arguments.quantization)}

    def peft_config(self) -> Any | None:
        """Return the peft config to wrap the model with; None if all weights are trained, or the biases (BitFit)."""
        from autotune.adapters import peft_config

        return None if self.arguments.adapter is None else peft_config(self.arguments.adapter)

    def build_model(self) -> PreTrainedModel:
        """Return the model with random weights on the device, as a trial builds it: to try a result out.

        Raises:
            InputError: The installed transformers can't build it, or it is made by a loop of the user's own.
        """
        from autotune.models import build_model

        self._check_model()
        return build_model(
            self.workload.model,
            self.workload.task,
            device=self.hardware.kind,
            quantization=self.arguments.quantization,
            **self.arguments.model,
        )

    def prepare_model(self, model: Any) -> Any:
        """Return `model` as the trials trained it: the adapter put on, if there is one, and the loss normalised.

        The loss of a user's own code is left alone where the code computes it.
        """
        from autotune.adapters import prepare_model, put_on

        code, adapter = self.workload.own_code, self.arguments.adapter
        if code is None or code.normalizes:
            return prepare_model(model, adapter)
        return model if adapter is None else put_on(model, adapter)

    def training_data(self, samples: int, *, directory: str | Path | None = None) -> tuple[Samples, Collator]:
        """Return a dataset of `samples` samples such as the trials trained on, and what makes batches of them.

        Args:
            samples: Length of the dataset; the data start again from their beginning when they end.
            directory: Only for data from a file: where their tokens are, such as `data` of a run directory, or are
                to be put.

        Raises:
            InputError: The file that the search read can't be read any more, or the data are the user's own code's.
            RunDirectoryError: `directory` can't be written.
        """
        self._check_model()
        from autotune.corpus import TOKENS
        from autotune.data import prepare, training_data
        from autotune.models import build_config

        where = Path(directory) if directory is not None else None
        if self.workload.dataset is not None and where is not None and not (where / TOKENS).exists():
            prepare(self.workload, where)
        config = build_config(self.workload.model, self.workload.task)
        return training_data(self.workload, config, samples=samples, directory=where, config=self.best.config)

    def _check_model(self) -> None:
        """Refuse what needs a model that is known by name."""
        if self.workload.own_code is not None:
            raise InputError(f"{self.workload.own_code.shown} makes its own model and data")
        if self.workload.model.source == "own":
            raise InputError(f"{self.workload.model.name} makes its own model and data")

    def __str__(self) -> str:
        """Return what the command line shows: the table, the verdict, the notes."""
        from autotune.notebook import text_of

        return text_of(self)

    def __repr__(self) -> str:
        """Return the verdict in a line; `model_dump_json()` has everything."""
        return f"<TuningResult {self.workload.model.name}: {self.verdict}, {len(self.trials)} trials>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: baseline against winner, what changes, charts."""
        from autotune.notebook import html_of

        return html_of(self)

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
            f"{path}: not a result of autotune (schema {SCHEMA_VERSION}): {where}: {complaint(first)}"
        ) from None
