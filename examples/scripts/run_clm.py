"""Fine-tunes a causal language model on texts from local files, cut into blocks of equal length.

The usual script around transformers' Trainer: it knows nothing of autotune. Data are text, CSV or JSON lines with a
column `text`. Without a validation file a share of the texts is held out.

    python examples/make_tiny.py tiny
    python examples/scripts/run_clm.py --model_name_or_path tiny/llama --train_file tiny/texts.json \
        --block_size 128 --do_train --do_eval --output_dir out
"""

import logging
import math
import sys
from dataclasses import dataclass, field
from itertools import chain

import transformers
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Which model is trained."""

    model_name_or_path: str = field(metadata={"help": "Directory or hub id of the model."})
    from_scratch: bool = field(default=False, metadata={"help": "Random weights in place of the model's own."})
    dtype: str = field(default="float32", metadata={"help": "In which the weights are loaded."})


@dataclass
class DataTrainingArguments:
    """What it is trained on."""

    train_file: str = field(metadata={"help": "Text, CSV or JSON lines to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "The same to evaluate on."})
    validation_split_percentage: int = field(default=5, metadata={"help": "Held out if there is no such file."})
    block_size: int = field(default=1024, metadata={"help": "Tokens of a block, at most those the model takes."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})
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

    raw = load(data_args)
    column = "text" if "text" in raw["train"].column_names else raw["train"].column_names[0]
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    if model_args.from_scratch:
        model = AutoModelForCausalLM.from_config(config, dtype=model_args.dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            model_args.model_name_or_path, config=config, dtype=model_args.dtype
        )
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    block_size = min(data_args.block_size, config.max_position_embeddings)

    def tokenize(rows):
        return tokenizer([text + tokenizer.eos_token for text in rows[column]])

    def group_texts(rows):
        joined = {name: list(chain.from_iterable(values)) for name, values in rows.items()}
        length = len(joined["input_ids"]) // block_size * block_size  # the rest of each batch of texts is dropped
        blocks = {
            name: [values[start : start + block_size] for start in range(0, length, block_size)]
            for name, values in joined.items()
        }
        return {**blocks, "labels": [list(block) for block in blocks["input_ids"]]}

    how = {
        "batched": True,
        "num_proc": data_args.preprocessing_num_workers,
        "load_from_cache_file": not data_args.overwrite_cache,
    }
    with training_args.main_process_first(desc="tokenizing"):
        tokens = raw.map(tokenize, remove_columns=raw["train"].column_names, desc="tokenizing", **how)
        blocks = tokens.map(group_texts, desc=f"blocks of {block_size}", **how)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"] if training_args.do_train else None,
        eval_dataset=blocks["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )

    if training_args.do_train:
        outcome = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = {**outcome.metrics, "train_samples": len(blocks["train"])}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def load(data_args: DataTrainingArguments):
    """Return the texts to train on and to evaluate on."""
    kind = {"txt": "text", "csv": "csv"}.get(data_args.train_file.rsplit(".", 1)[-1], "json")
    if data_args.validation_file is not None:
        return load_dataset(kind, data_files={"train": data_args.train_file, "validation": data_args.validation_file})
    held_out = data_args.validation_split_percentage
    files = {"train": data_args.train_file}
    raw = load_dataset(kind, data_files=files)
    raw["validation"] = load_dataset(kind, data_files=files, split=f"train[:{held_out}%]")
    raw["train"] = load_dataset(kind, data_files=files, split=f"train[{held_out}%:]")
    return raw


if __name__ == "__main__":
    main()
