"""Your own Trainer: tuned with its model, data, collator and loss as they are.

For whom: who has a script around transformers' Trainer. Shows `find(trainer=...)`, training with the answer, and the
callback that holds real training against the promise. How long: five minutes (effort "quick"); see `--max-time`.

    python examples/own_trainer.py tiny/bert tiny/pairs-train.csv          (both made by make_tiny.py)
"""

import argparse

import torch
import transformers
from datasets import load_dataset

import autotune


def main() -> None:
    """Tune a Trainer, then train with what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory or hub id of an encoder")
    parser.add_argument("data", help="CSV with sentence1, sentence2 and label (0 or 1)")
    parser.add_argument("--max-time", help="of the search, such as 2m; by default what the effort stands for")
    options = parser.parse_args()
    mine = transformers.TrainingArguments("out", gradient_accumulation_steps=2, report_to="none")
    trainer = make_trainer(options.model, options.data, mine)
    result = autotune.find(trainer=trainer, effort="quick", max_time=options.max_time)
    print(f"{result.verdict}: {result.best.measurement.samples_per_second:.1f} samples/s")
    print("\n".join(f"  {change.knob}: {change.before} -> {change.after}" for change in result.best.changes))

    tuned = result.training_arguments("out", max_steps=50, save_strategy="no", report_to="none")
    trainer = make_trainer(options.model, options.data, tuned, **result.model_kwargs())
    trainer.add_callback(autotune.AutotuneCallback(result))  # says how fast it was beside what was promised
    trainer.train()


def make_trainer(model: str, data: str, arguments: transformers.TrainingArguments, **kwargs: object) -> object:
    """Return a Trainer as anybody has it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows = load_dataset("csv", data_files=data, split="train")
    cut = {"truncation": True, "max_length": 128}
    return transformers.Trainer(
        model=transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=2, **kwargs),
        args=arguments,
        train_dataset=rows.map(lambda row: tokenizer(row["sentence1"], row["sentence2"], **cut)),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_loss_func=weighted_loss,
    )


def weighted_loss(outputs: object, labels: torch.Tensor, num_items_in_batch: int | None = None) -> torch.Tensor:
    """Return a loss of one's own: the second class counts twice."""
    weight = torch.tensor([1.0, 2.0], device=labels.device)
    total = torch.nn.functional.cross_entropy(outputs.logits.float(), labels, weight, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


if __name__ == "__main__":
    main()
