"""The training scripts of transformers and TRL, each tuned unchanged on a tiny model and local data, then run.

The scripts aren't part of this project. AUTOTUNE_TRANSFORMERS_EXAMPLES is the folder `examples/pytorch` of a clone of
transformers, AUTOTUNE_TRL_EXAMPLES the folder `examples/scripts` of one of TRL; the package trl has the others.
`evaluate` reads its metrics from the working directory, where the test writes small ones.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import unchanged_data
from running import python, run_example

import autotune
from autotune.integrations.callback import FILE_NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMON = "--output_dir out --report_to none --use_cpu --per_device_train_batch_size 4 --max_steps 4 --logging_steps 2"
EVALUATED = "--do_train --do_eval --eval_strategy steps --eval_steps 2 --per_device_eval_batch_size 4"
SPLIT = "--eval_strategy steps --eval_steps 2 --per_device_eval_batch_size 4"
GENERATES = "--predict_with_generate --generation_max_length 12 --num_beams 1"


def files(name: str) -> str:
    return f"--train_file {name}.json --validation_file few-{name}.json"


# Folder, model and arguments of each script: what its users write, with paths of `unchanged_data`.
TRANSFORMERS = {
    "text-classification/run_glue": "bert --train_file pairs-train.csv --validation_file pairs-validation.csv "
    "--max_seq_length 64",
    "language-modeling/run_clm": f"llama {files('texts')} --block_size 64",
    "language-modeling/run_mlm": f"masked {files('texts')} --max_seq_length 64",
    "summarization/run_summarization": f"t5 {files('summaries')} --max_source_length 64 --max_target_length 16 "
    f"{GENERATES}",
    "translation/run_translation": f"t5 {files('translations')} --source_lang en --target_lang de "
    f"--max_source_length 32 --max_target_length 16 {GENERATES}",
    "question-answering/run_qa": f"bert {files('questions')} --max_seq_length 64 --doc_stride 16",
    "image-classification/run_image_classification": "vit --train_dir images --train_val_split 0.2 "
    "--remove_unused_columns False",
    "speech-recognition/run_speech_recognition_ctc": "wav2vec2 --dataset_name speech --text_column_name text "
    "--train_split_name train --eval_split_name test --length_column_name input_length",
    "speech-recognition/run_speech_recognition_seq2seq": "whisper --dataset_name speech --text_column_name text "
    "--eval_split_name test --max_duration_in_seconds 1.0 --freeze_feature_encoder False --predict_with_generate "
    "--generation_max_length 12",
}
GENERATED = "llama --dataset_name prompts --reward_funcs rewards.brief --max_completion_length 8 --num_generations 4"
TRL = {
    "sft": f"llama --dataset_name chats --max_length 64 {SPLIT}",
    "dpo": f"llama --dataset_name preferences --max_length 64 {SPLIT}",
    "reward": f"llama --dataset_name preferences --max_length 64 {SPLIT}",
    "kto": f"llama --dataset_name judged --max_length 64 {SPLIT}",
    **dict.fromkeys(("grpo", "rloo"), GENERATED),
}

NEEDS = {"image-classification": "torchvision", "speech-recognition": "torchcodec", "summarization": "nltk"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("scripts")
    run_example("make_tiny.py", made, "--texts", 300, cwd=made)
    unchanged_data.make(made)
    return made


def commands():
    """Return the command line of each script, and the packages that it needs."""
    examples = os.environ.get("AUTOTUNE_TRANSFORMERS_EXAMPLES", "")
    for name, arguments in TRANSFORMERS.items():
        folder, _, short = name.partition("/")
        needs = ("evaluate", *filter(None, [NEEDS.get(folder)]))
        yield pytest.param(name, f"{examples}/{name}.py", f"{arguments} {EVALUATED}", needs, id=short)
    for name, arguments in TRL.items():
        yield pytest.param(name, f"-m trl.scripts.{name}", arguments, ("trl",), id=f"trl-{name}")
    script = f"{os.environ.get('AUTOTUNE_TRL_EXAMPLES', '')}/sft_vlm.py"
    yield pytest.param("sft_vlm", script, "vlm --dataset_name pictures", ("trl", "torchvision"), id="trl-sft_vlm")


def autotune_script(folder, *arguments):
    own = ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "AUTOTUNE_HOME", "NLTK_DATA")
    caches = {name: str(folder / name.lower()) for name in own}
    command = ("-m", "autotune", "script", *arguments)
    return python(*command, cwd=folder, timeout=500, **caches)


@pytest.mark.parametrize(("name", "script", "arguments", "needs"), [*commands()])
def test_a_script_is_tuned_unchanged_checked_and_run(folder, name, script, arguments, needs):
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    if missing or not (script.startswith("-m") or Path(script).is_file()):
        pytest.skip(f"needs {', '.join(missing) or 'the folder of the examples'}")
    shutil.rmtree(folder / "out", ignore_errors=True)
    command = ["python", *script.split(), "--model_name_or_path", *arguments.split(), *COMMON.split()]
    answer = folder / f"{name.rpartition('/')[2]}.json"
    search = ["--effort", "quick", "--max-trials", "2", "--max-time", "3m", "--run-dir"]
    tuned = autotune_script(folder, *search, answer.with_suffix(""), "-o", answer, "--", *command)
    assert tuned.returncode == 0, tuned.stdout[-3000:] + tuned.stderr[-3000:]
    result = autotune.load(answer)
    assert result.best.measurement.samples_per_second > 0
    assert result.soaked is not None
    assert (result.soaked.eval_batch_size is not None) == ("--eval_strategy" in arguments)
    applied = autotune_script(folder, "--apply", answer, "--", *command)
    assert applied.returncode == 0, applied.stderr[-3000:]
    assert (folder / "out" / FILE_NAME).is_file()  # the comparison with what was promised
