"""Fine-tunes a causal language model on conversations with TRL's SFTTrainer, from a local file.

The usual script around TRL (`pip install trl`): it knows nothing of autotune. Data are JSON lines
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.

    python examples/make_tiny.py tiny
    python examples/scripts/sft.py --model_name_or_path tiny/llama --train_file tiny/chats.json --max_length 128 \
        --output_dir out --use_cpu

TRL trains in bf16 and with gradient checkpointing unless told otherwise; without a GPU it asks for --use_cpu.
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, TrlParser


@dataclass
class ScriptArguments:
    """Which model is trained, on what."""

    model_name_or_path: str = field(metadata={"help": "Directory or hub id of the model."})
    train_file: str = field(metadata={"help": "JSON lines of conversations."})
    validation_percentage: int = field(default=5, metadata={"help": "Held out to evaluate on."})
    lora_r: int | None = field(default=None, metadata={"help": "Rank of LoRA; all weights are trained without."})


def main() -> None:
    """Train, save and evaluate as the command line asks."""
    script_args, training_args = TrlParser((ScriptArguments, SFTConfig)).parse_args_and_config()

    chats = load_dataset("json", data_files=script_args.train_file, split="train")
    split = chats.train_test_split(test_size=script_args.validation_percentage / 100, seed=training_args.seed)
    adapter = None
    if script_args.lora_r is not None:
        adapter = LoraConfig(r=script_args.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")

    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(script_args.model_name_or_path, dtype="float32"),
        args=training_args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=AutoTokenizer.from_pretrained(script_args.model_name_or_path),
        peft_config=adapter,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
