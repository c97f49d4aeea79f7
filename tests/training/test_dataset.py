"""Samples of each task, synthetic ones and those of the user's texts, and their batches."""

import pickle

import pytest
import torch
import transformers
from corpora import USUAL_MODEL, VOCABULARY, config_of, texts, workload_of
from torch.utils.data import DataLoader

from autotune.training.dataset import IGNORED, training_data
from autotune.training.resolve import HEADS
from autotune.training.texts import prepare
from autotune.values.model import Task
from autotune.values.workload import SYNTHETIC_SAMPLES

OF_TEXTS = [t for t in Task.heads() if t.takes_text and t is not Task.IMAGE_TEXT_TO_TEXT]


def synthetic(task, model_type=None, samples=16, **fields):
    workload = workload_of(task, model_type, **fields)
    return training_data(workload, config_of(workload.model.model_type), samples=samples, directory=None)


@pytest.fixture
def read(tmp_path):
    """Return a function that gives samples of texts in a file, and their collator."""

    def samples_of(task, *values, model_type=None, samples=8, **order):
        workload = workload_of(task, model_type, dataset=texts(tmp_path / "a.jsonl", *values))
        prepare(workload, tmp_path / "run")
        config = config_of(workload.model.model_type)
        return training_data(workload, config, samples=samples, directory=tmp_path / "run", **order)

    return samples_of


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def loss_of(task, model_type, batch):
    """Return the loss of a tiny model on `batch` after a backward pass."""
    loss = getattr(transformers, HEADS[task][0]).from_config(config_of(model_type))(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    return float(loss.detach())


@pytest.mark.parametrize("task", Task.heads())
def test_samples_of_each_task_depend_on_seed_and_index_alone_and_a_model_trains_on_them(task):
    data, collator = synthetic(task, samples=2 * SYNTHETIC_SAMPLES)
    again, other = synthetic(task)[0], synthetic(task, seed=7)[0]
    again[11]
    assert len(data) == 2 * SYNTHETIC_SAMPLES
    assert same(data[5], data[SYNTHETIC_SAMPLES + 5])
    assert all(same(data[i], again[i]) for i in range(16))
    assert not all(same(data[i], other[i]) for i in range(16))
    unpickled, collator_again = pickle.loads(pickle.dumps((data, collator)))
    assert same(collator([data[3]]), collator_again([unpickled[3]]))
    assert loss_of(task, USUAL_MODEL[task], collator([data[i] for i in range(4)])) > 0


@pytest.mark.parametrize("task", OF_TEXTS)
def test_texts_of_one_length_have_the_mask_that_a_tokenizer_gives(task):
    data, collator = synthetic(task)
    batch = collator([data[0], data[1]])
    assert batch["attention_mask"].tolist() == torch.ones_like(batch["input_ids"]).tolist()
    assert all(torch.equal(batch["input_ids"][i], data[i]["input_ids"]) for i in range(2))


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt2", "t5", "bart"])
def test_synthetic_ids_are_ordinary_ones_of_the_vocabulary(model_type):
    config = config_of(model_type)
    data, _ = synthetic(Task.CAUSAL_LM, model_type, samples=SYNTHETIC_SAMPLES)
    ids = torch.stack([data[i]["input_ids"] for i in range(SYNTHETIC_SAMPLES)])[:, :-1]
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "eos", "bos")}
    assert ids.max() < VOCABULARY
    assert not special & set(ids.unique().tolist())


@pytest.mark.parametrize(
    ("task", "model_type", "lengths", "shapes"),
    [
        (Task.SEQ2SEQ_LM, "t5", {"target_length": 9}, {"input_ids": (24,), "labels": (9,)}),
        (Task.SEQ2SEQ_LM, "t5", {"sequence_length": 13}, {"input_ids": (13,), "labels": (13,)}),
        (Task.CAUSAL_LM, "llama", {"sequence_length": 17}, {"input_ids": (17,), "labels": (17,)}),
        (Task.IMAGE_CLASSIFICATION, "resnet", {}, {"pixel_values": (1, 224, 224), "labels": ()}),
        # A stride of 20 ms and a window of 25, at 16 kHz; transcripts are shorter.
        (Task.SPEECH_CTC, "wav2vec2", {}, {"input_values": (23 * 320 + 400,), "labels": (6,)}),
        (Task.SPEECH_SEQ2SEQ, "whisper", {"target_length": 9}, {"input_features": (4, 40), "labels": (9,)}),
    ],
)
def test_samples_have_the_lengths_of_the_workload_or_the_sizes_of_the_config(task, model_type, lengths, shapes):
    data, _ = synthetic(task, model_type, **lengths)
    assert {name: tuple(value.shape) for name, value in data[0].items()} == shapes


@pytest.mark.parametrize(("end", "last"), [(1, 1), ([7, 8], 7), (10**6, None)])
def test_texts_end_with_the_first_end_token_of_the_vocabulary(end, last):
    data, _ = training_data(workload_of(), config_of("llama", eos_token_id=end), samples=4, directory=None)
    ids = data[0]["input_ids"]
    assert int(ids.max()) < VOCABULARY
    assert last is None or int(ids[-1]) == last
    assert not isinstance(end, list) or 8 not in ids


def test_long_texts_are_few():
    data, _ = synthetic(Task.CAUSAL_LM, sequence_length=1 << 20, samples=20)
    assert data.dataset.datasets[0].rows["input_ids"].shape == (16, 1 << 20)
    assert torch.equal(data[3]["input_ids"], data[19]["input_ids"])


@pytest.mark.parametrize(("length", "masked"), [(100, 15), (1, 1)])
def test_fifteen_percent_of_the_positions_have_labels_their_own_ids(length, masked):
    data, _ = synthetic(Task.MASKED_LM, sequence_length=length)
    labelled = [data[i]["labels"] != IGNORED for i in range(16)]
    assert {int(each.sum()) for each in labelled} == {masked}
    assert torch.equal(data[0]["labels"][labelled[0]], data[0]["input_ids"][labelled[0]])


def test_classes_are_those_of_the_head():
    config = config_of("bert", num_labels=5)
    data, _ = training_data(workload_of(Task.SEQUENCE_CLASSIFICATION), config, samples=200, directory=None)
    assert {int(data[i]["labels"]) for i in range(200)} == set(range(5))


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_a_problem_of_numbers_has_one_for_each_of_its_labels(problem):
    config = config_of("bert", num_labels=3, problem_type=problem)
    data, collator = training_data(workload_of(Task.SEQUENCE_CLASSIFICATION), config, samples=4, directory=None)
    batch = collator([data[i] for i in range(4)])
    assert batch["labels"].shape == (4, 3)
    transformers.AutoModelForSequenceClassification.from_config(config)(**batch).loss.backward()


def test_images_have_the_shape_of_the_config_or_are_clusters_of_their_colours():
    config = config_of("vit", image_size=(32, 48), num_channels=2)
    data, _ = training_data(workload_of(Task.IMAGE_CLASSIFICATION), config, samples=1, directory=None)
    assert (data[0]["pixel_values"].shape, data[0]["pixel_values"].dtype) == ((2, 32, 48), torch.float32)
    config = transformers.ImageGPTConfig(vocab_size=9, n_positions=16)
    data, _ = training_data(workload_of(Task.IMAGE_CLASSIFICATION), config, samples=8, directory=None)
    ids = torch.stack([data[i]["input_ids"] for i in range(8)])
    assert ids.shape == (8, 16)
    assert set(ids.unique().tolist()) == set(range(8))  # the ninth starts a sequence


def test_transcripts_are_shorter_than_the_recording_and_hold_no_blank():
    data, _ = synthetic(Task.SPEECH_CTC, sequence_length=24, samples=200)
    assert all(len(sample["labels"]) == 6 and (sample["labels"] != 0).all() for sample in data)


@pytest.mark.parametrize(
    ("task", "model_type"),
    # BART's looks for the token that ends a text.
    [*((task, USUAL_MODEL[task]) for task in OF_TEXTS), (Task.SEQUENCE_CLASSIFICATION, "bart")],
)
def test_a_model_trains_on_real_batches_which_are_as_long_as_their_longest_text(task, model_type, read):
    data, collator = read(task, "abc", "abcdef", "abcdefghi", model_type=model_type)
    assert collator([data[0], data[1]])["input_ids"].shape == (2, 7)
    assert loss_of(task, model_type, collator([data[i] for i in range(3)])) > 0


def test_padding_is_masked_and_has_no_labels(read):
    data, collator = read(Task.CAUSAL_LM, "ab", "abcd")
    batch = collator([data[0], data[1]])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"][0, 3:].tolist() == [IGNORED] * 2


def test_masks_of_real_texts_depend_on_the_sample(read):
    data, _ = read(Task.MASKED_LM, "the very same text", "the very same text")
    assert same(data[0], data[2])
    assert not same(data[0], data[1])


def test_data_loader_workers_give_what_the_main_process_gives(read):
    data, collator = read(Task.MASKED_LM, *(f"text number {i}" for i in range(9)))
    alone = DataLoader(data, batch_size=4, collate_fn=collator)
    forked = DataLoader(data, batch_size=4, collate_fn=collator, num_workers=2, multiprocessing_context="fork")
    assert all(same(a, b) for a, b in zip(alone, forked, strict=True))


OF_MANY_LENGTHS = ["x" * (2 + i % 7) for i in range(40)]


def test_the_longest_rows_can_come_first_and_the_rest_is_shuffled_by_the_seed_alone(read):
    plain, sorted_first = (
        [len(sample["input_ids"]) for sample in read(Task.CAUSAL_LM, *OF_MANY_LENGTHS, samples=44, longest_first=n)[0]]
        for n in (0, 2)
    )
    assert sorted_first[:4] == [max(plain)] * 4  # of two steps
    assert sorted_first[4:] == plain[:40]
    assert plain[:40] != sorted(plain[:40])
