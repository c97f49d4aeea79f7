"""Fine-tunes an encoder on the classification of sentences, or pairs of them, from local files.

The usual script around transformers' Trainer: it knows nothing of autotune. Data are CSV or JSON lines with the
columns `label` and `sentence`, or `sentence1` and `sentence2`.

    python examples/make_tiny.py tiny
    python examples/scripts/run_glue.py --model_name_or_path tiny/bert --train_file tiny/pairs-train.csv \
        --validation_file tiny/pairs-validation.csv --do_train --do_eval --output_dir out
"""

import logging
import sys
from dataclasses import dataclass, field

import numpy as np
import transformers
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Which model is fine-tuned."""

    model_name_or_path: str = field(metadata={"help": "Directory or hub id of the model."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Of the tokenizer, if it is elsewhere."})


@dataclass
class DataTrainingArguments:
    """What it is trained on."""

    train_file: str = field(metadata={"help": "CSV or JSON lines to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "The same to evaluate on."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer samples are cut to so many tokens."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Pad all samples to the same length."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many samples."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again."})


def main() -> None:
    """Train, save and evaluate as the command line asks."""
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(sys.argv[1])
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()

    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(message)s", handlers=[logging.StreamHandler()])
    logger.setLevel(training_args.get_process_log_level())
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())
    logger.warning("device: %s, bf16: %s, fp16: %s", training_args.device, training_args.bf16, training_args.fp16)
    set_seed(training_args.seed)

    files = {"train": data_args.train_file}
    if data_args.validation_file is not None:
        files["validation"] = data_args.validation_file
    raw = load_dataset("csv" if data_args.train_file.endswith(".csv") else "json", data_files=files)
    labels = sorted(raw["train"].unique("label"))
    keys = ("sentence1", "sentence2") if "sentence1" in raw["train"].column_names else ("sentence",)

    config = AutoConfig.from_pretrained(model_args.model_name_or_path, num_labels=len(labels))
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, config=config)
    model.config.label2id = {str(label): number for number, label in enumerate(labels)}
    model.config.id2label = {number: str(label) for number, label in enumerate(labels)}

    def preprocess(rows):
        columns = (rows[key] for key in keys)
        padding = "max_length" if data_args.pad_to_max_length else False
        encoded = tokenizer(*columns, padding=padding, max_length=data_args.max_seq_length, truncation=True)
        encoded["label"] = [labels.index(label) for label in rows["label"]]
        return encoded

    with training_args.main_process_first(desc="tokenizing"):
        tokens = raw.map(
            preprocess,
            batched=True,
            remove_columns=raw["train"].column_names,
            load_from_cache_file=not data_args.overwrite_cache,
            desc="tokenizing",
        )
    train_dataset = tokens["train"]
    if data_args.max_train_samples is not None:
        train_dataset = train_dataset.select(range(min(len(train_dataset), data_args.max_train_samples)))

    def compute_metrics(predicted: EvalPrediction) -> dict[str, float]:
        return {"accuracy": float((np.argmax(predicted.predictions, axis=1) == predicted.label_ids).mean())}

    # Batches are padded to their longest sample, unless all samples are already.
    collator = default_data_collator if data_args.pad_to_max_length else DataCollatorWithPadding(tokenizer)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=tokens["validation"] if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=collator,
    )

    if training_args.do_train:
        outcome = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", outcome.metrics)
        trainer.save_metrics("train", outcome.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
