"""Examples run as a user would run them, with the answer of a real search."""

import json
import runpy
import sys

import pytest
from running import ROOT, run_example

import autotune
from autotune.training.arguments import training_plan
from autotune.values.techniques import LoraAdapter


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """Return a function that gives the lines which an example prints in this process, which has all imported."""

    def run(name: str, *arguments: object) -> list[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_train_with_result_trains_the_searched_step_and_says_how_fast(answer, run_here):
    printed = json.loads(run_here("train_with_result.py", answer, "--steps", 3)[-1])
    result = autotune.load(answer)
    assert printed["samples_per_step"] == result.workload.global_batch_size
    assert printed["steps"] == 3
    assert printed["trained_parameters"] == result.facts.parameters
    assert printed["samples_per_second"] > 0
    assert printed["measured_by_autotune"] == result.best.measurement.samples_per_second
    assert printed["loss"] == pytest.approx(result.best.measurement.loss, rel=0.05)


@pytest.mark.slow
def test_train_with_result_trains_an_adapter_if_one_won(answer, tmp_path):
    result = autotune.load(answer)
    config = result.best.config.model_copy(update={"adapter": LoraAdapter(rank=2)})
    mapping = training_plan(config, result.workload, result.hardware)
    best = result.best.model_copy(update={"config": config})
    arguments = result.arguments.model_copy(update={"adapter": mapping.adapter})
    result.model_copy(update={"best": best, "arguments": arguments}).save(tmp_path / "lora.json")
    printed = json.loads(run_example("train_with_result.py", "lora.json", "--steps", 2, cwd=tmp_path)[-1])
    assert 0 < printed["trained_parameters"] < result.facts.parameters / 10


def test_a_prepared_model_gives_its_share_of_the_steps_loss(answer):
    result = autotune.load(answer)
    samples, collator = result.training_data(2)
    batch = collator([samples[0], samples[1]])
    model = result.prepare_model(result.build_model())
    whole = model(**batch).loss
    labels = batch["labels"][:, 1:].numel()  # a causal model learns nothing from the first
    assert model(**batch, num_items_in_batch=2 * labels).loss.item() == pytest.approx(whole.item() / 2)


def test_training_data_from_a_file_are_tokenized_once(answer, tmp_path):
    texts = tmp_path / "texts.txt"
    longer = "a rather longer line than the search has room for, so that its end is cut off" * 2
    texts.write_text(f"short\n{longer}\n" * 2)
    result = autotune.load(answer)
    workload = result.workload.model_copy(update={"dataset": str(texts)})
    result = result.model_copy(update={"workload": workload})
    first, _ = result.training_data(6, directory=tmp_path / "tokens")
    texts.unlink()
    again, _ = result.training_data(6, directory=tmp_path / "tokens")
    lengths = [len(again[index]["input_ids"]) for index in range(6)]
    assert lengths == [len(first[index]["input_ids"]) for index in range(6)]
    assert max(lengths) == result.workload.sequence_length
    assert min(lengths) < 10


def test_quick_start_saves_what_it_found(answer):
    lines = (answer.parent / "printed.txt").read_text().splitlines()
    result = autotune.load(answer)
    assert lines[0].startswith(result.verdict)
    assert lines[-1].startswith("saved: best-config.json")
    assert len([line for line in lines if line.startswith("  trial ")]) == len(result.trials)


def test_a_study_of_your_own_asks_until_nothing_is_worth_a_trial_and_make_texts_as_many_texts_as_asked(
    run_here, tmp_path
):
    printed = run_here("own_study.py", ROOT / "benchmarks" / "tables" / "llama-1m.jsonl")
    assert "more trials are expected to gain" in printed[-2]
    assert "samples/s with" in printed[-1]
    run_here("make_texts.py", "texts.jsonl", "--count", 20)
    assert len(set((tmp_path / "texts.jsonl").read_text().splitlines())) == 20


def test_every_example_is_described():
    described = (ROOT / "examples" / "README.md").read_text()
    for script in (ROOT / "examples").rglob("*.py"):
        assert f"`{script.relative_to(ROOT / 'examples')}`" in described
