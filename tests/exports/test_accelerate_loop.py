"""The optimizers of the script with a loop of its own."""

import pytest
from transformers import Trainer, TrainingArguments

from autotune.exports import accelerate_loop
from autotune.values.techniques import OPTIMIZERS


@pytest.mark.parametrize("name", accelerate_loop.NAMES)
def test_a_loop_makes_the_optimizer_that_the_trainer_makes(name, tmp_path):
    package = OPTIMIZERS[name].package
    if package is not None:
        pytest.importorskip(package)
    own = {"learning_rate": 1e-3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-7}
    arguments = TrainingArguments(str(tmp_path), optim=name, use_cpu=True, **own)
    kind, told = Trainer.get_optimizer_cls_and_kwargs(arguments)
    made = accelerate_loop.loop_optimizer(name, lambda hyperparameter: getattr(arguments, hyperparameter))
    assert made.name == kind.__name__
    assert made.arguments == told
