"""The answer of a search with what can be done with it: training arguments, files, models, a notebook's view."""

import html
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError
from autotune.exports import launch_files, targets
from autotune.output.table import text_of
from autotune.storage.run_directory import read_result
from autotune.training import adapters
from autotune.training.arguments import arguments_class, arguments_of
from autotune.training.inputs import freeze, is_vision
from autotune.values.hardware import ALLOCATOR_VARIABLE, allocator_settings, installed_versions
from autotune.values.result import ResultData

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from autotune.training.dataset import Collator


class TuningResult(ResultData):
    """The answer of a search."""

    def training_arguments(self, output_dir: str | Path, **overrides: Any) -> "TrainingArguments":
        """Return `transformers.TrainingArguments` of the best configuration, or those of the recipe, as measured.

        Args:
            output_dir: Where the Trainer writes.
            **overrides: Any other argument of TrainingArguments, or another value for one.

        Warns where the environment lacks what no argument says: expandable segments, and sequence parallelism. Of
        several visible GPUs an answer for one trains on the first.

        Raises:
            ValueError: The installed transformers or this machine refuses an argument.
        """
        for name, value in launch_files.environment(self.best.config).items():
            given = allocator_settings() if name == ALLOCATOR_VARIABLE else os.environ.get(name)
            if value not in (given or ""):
                warnings.warn(f"measured with {name}={value}: start Python with it, no argument says it", stacklevel=2)
        here = self.hardware.model_copy(update={"versions": installed_versions()})
        tuned = arguments_of(self.best.config, self.workload, here, self.soaked).training_arguments
        whole = {"output_dir": str(output_dir), **tuned, **overrides}
        made: TrainingArguments = arguments_class(self.workload.recipe)(**whole)
        if self.best.config.parallelism.is_single and made.n_gpu > 1:
            made._n_gpu = 1  # no DataParallel, whose steps are larger
        return made

    @property
    def launch_commands(self) -> tuple[str, ...]:
        """The command lines that start training with the best configuration; `export` writes the files they name."""
        return launch_files.launch_commands(self)

    def export(self, target: str, directory: str | Path) -> targets.Exported:
        """Write the best configuration for another tool: the targets of `autotune export --to`, or 'all' of them.

        Returns:
            The paths, the command lines that use them, and what of the configuration the target can't express.

        Raises:
            InputError: There is no such target, or it can't train this.
            OSError: The directory can't be written.
        """
        return targets.write(self, target, targets.drafts(self, target)[0], Path(directory))

    def model_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of `from_pretrained`; of `from_config` too, but for quantized base weights."""
        if self.arguments.quantization is None:
            return dict(self.arguments.model)
        from transformers import BitsAndBytesConfig

        return {**self.arguments.model, "quantization_config": BitsAndBytesConfig(**self.arguments.quantization)}

    def peft_config(self) -> Any | None:
        """Return the peft config to wrap the model with; None if all weights are trained, or the biases (BitFit)."""
        return None if self.arguments.adapter is None else adapters.peft_config(self.arguments.adapter)

    def build_model(self) -> "PreTrainedModel":
        """Return the model with random weights on the device, as a trial builds it: to try a result out.

        Raises:
            InputError: The installed transformers can't build it, or it is made by a loop of the user's own.
        """
        from autotune.training.build import build_model

        self._check_model()
        return build_model(
            self.workload.model,
            self.workload.task,
            device=self.hardware.kind,
            quantization=self.arguments.quantization,
            **self.arguments.model,
        )

    def prepare_model(self, model: Any) -> Any:
        """Return `model` as the trials trained it: frozen as asked, its loss normalised, with its adapter.

        Checkpointing that a user's own code has switched on is switched off where the answer has none. The loss of code
        that computes it itself is left as it is.
        """
        from autotune.training.loss import base_model

        code, adapter = self.workload.own_code, self.arguments.adapter
        if self.workload.model.freeze_vision:
            freeze(model, is_vision)
        if code is not None and code.checkpoints and self.best.config.checkpointing == "none":
            base_model(model)._set_gradient_checkpointing(enable=False)
        if (code is None or code.normalizes) and self.workload.recipe is None:
            return adapters.prepare_model(model, adapter, self.best.config)
        mixed = self.best.config.mixed_precision != "no" and self.workload.recipe is None
        return model if adapter is None else adapters.put_on(model, adapter, mixed=mixed)

    def training_data(self, samples: int, *, directory: str | Path | None = None) -> tuple[Any, "Collator"]:
        """Return a dataset of `samples` samples such as the trials trained on, and what makes batches of them.

        Args:
            samples: Length of the dataset; the data start again from their beginning when they end.
            directory: Only for data from a file: where their lengths are, such as `data` of a run directory, or
                are to be put [read anew each time].

        Raises:
            InputError: The file that the search read can't be read any more, or the data are the user's own code's.
            RunDirectoryError: `directory` can't be written.
        """
        self._check_model()
        from autotune.training.build import build_config
        from autotune.training.dataset import training_data
        from autotune.training.texts import TEXT_LENGTHS, prepare

        if self.workload.dataset is not None and directory is None:
            with tempfile.TemporaryDirectory() as made:
                return self.training_data(samples, directory=made)
        where = Path(directory) if directory is not None else None
        if self.workload.dataset is not None and where is not None and not (where / TEXT_LENGTHS).exists():
            prepare(self.workload, where)
        config = build_config(self.workload.model, self.workload.task)
        return training_data(self.workload, config, samples=samples, directory=where, config=self.best.config)

    def _check_model(self) -> None:
        """Refuse what needs a model that is known by name."""
        if self.workload.recipe is not None:
            raise InputError("a recipe's model and data are TRL's: `autotune export --to trl` writes a script")
        code, model = self.workload.own_code, self.workload.model
        if code is not None or model.source == "own":
            raise InputError(f"{code.shown if code is not None else model.name} makes its own model and data")

    def __str__(self) -> str:
        """Return what the command line shows: the table, the verdict, the notes."""
        return text_of(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the same."""
        return f"<pre>{html.escape(str(self))}</pre>"


def with_methods(data: ResultData) -> TuningResult:
    """Return the same answer with its methods."""
    return TuningResult(**{name: getattr(data, name) for name in ResultData.model_fields})


def load(path: str | Path) -> TuningResult:
    """Return the result saved in `path`.

    Raises:
        InputError: The file is missing, not JSON of a result, of another schema version, or its arguments aren't those
            that its configuration means.
    """
    return with_methods(read_result(path))
