"""An answer as a command line for the user's own script, and what such a line can't say."""

import pytest
from factories import make_config, make_hardware, make_plan, make_result, make_workload

from autotune.exports.user_launch import flags, lines, unsaid
from autotune.training.arguments import laid_over, plan
from autotune.tuning_result import with_methods
from autotune.values.trial import Purpose
from autotune.values.user_code import OwnCode
from autotune.verification.finals import Finals
from autotune.verification.state import SearchState
from autotune.verification.verdict import assemble


def answer(config, code=None, **workload):
    """The answer of a search in which `config` was seen to be faster than the Trainer's defaults."""
    base = make_config()
    code = code or OwnCode(kind="script", shown="python train.py", command=("train.py", "--lr", "1"), directory="/")
    made = make_workload(**workload)
    own = laid_over(plan(base, made, make_hardware()), made)  # the script's arguments are those of the baseline
    code = code.model_copy(update={"arguments": own})
    trials = [
        make_result(base, 10.0, purpose=Purpose.BASELINE),
        make_result(config, 20.0, number=1),
    ]
    search = make_plan(workload=made.model_copy(update={"own_code": code}), baseline=base, hardware=make_hardware())
    found = assemble(Finals(SearchState(search, trials)), 12.5)
    assert found is not None
    assert found.best.config == config
    return with_methods(found)


def test_flags_say_what_differs_from_the_scripts_own_arguments_and_nothing_else():
    found = flags(answer(make_config(16, precision="bf16", optim="adafactor")))
    assert dict(zip(found[::2], found[1::2], strict=True)) == {
        "--per_device_train_batch_size": "16",
        "--gradient_accumulation_steps": "1",
        "--optim": "adafactor",
        "--bf16": "True",
    }


def test_options_of_checkpointing_are_json_under_the_newer_name_alone():
    found = flags(answer(make_config(checkpointing="every-2nd")))
    assert found == (
        "--activation_checkpointing",
        "True",
        "--activation_checkpointing_kwargs",
        '{"use_reentrant": false, "every_n_layers": 2}',
    )
    assert flags(answer(make_config(checkpointing="full"))) == ("--activation_checkpointing", "True")


def test_what_flags_can_not_say_is_said():
    best = make_config(attn_implementation="eager", precision="pure_bf16", adapter={"rank": 4})
    found = answer(best)
    assert set(unsaid(found)) == {
        "model.set_attn_implementation('eager')",
        f"peft's {best.adapter.shown}",
        "weights in bfloat16",
    }


def test_a_script_is_run_again_by_a_command_that_can_be_copied():
    found = answer(make_config(16))
    first, second = lines(found, "runs/my run/best-config.json")
    assert first == "train with it: autotune script --apply 'runs/my run/best-config.json' -- python train.py --lr 1"
    assert "--per_device_train_batch_size 16 --gradient_accumulation_steps 1" in second
    assert found.launch_commands == ("autotune script --apply best-config.json -- python train.py --lr 1",)


def test_a_trainer_is_trained_from_python():
    code = OwnCode(kind="pickle", shown="trainer Trainer", directory="/")
    (line,) = lines(answer(make_config(16), code), "best-config.json")
    assert "result.training_arguments(output_dir)" in line


@pytest.mark.parametrize("field", ["build_model", "training_data"])
def test_a_model_and_data_of_the_users_code_are_not_made_up(field):
    from autotune.errors import InputError

    arguments = (1,) if field == "training_data" else ()
    with pytest.raises(InputError, match=r"python train.py makes its own model and data"):
        getattr(answer(make_config(16)), field)(*arguments)


def test_a_loss_that_the_users_code_computes_is_left_alone():
    from torch import nn

    model = nn.Linear(2, 2)
    assert answer(make_config(16)).prepare_model(model) is model
    assert type(model) is nn.Linear
