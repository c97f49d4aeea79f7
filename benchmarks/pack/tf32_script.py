"""A user's script that switches TF32 on itself and trains a Llama of random weights.

python tf32_script.py CONFIG.json OUTPUT
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

torch.backends.cuda.matmul.allow_tf32 = True


def main() -> None:
    """Train."""
    fields = json.loads(Path(sys.argv[1]).read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    tokens = torch.randint(fields["vocab_size"], (64, 32))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(sys.argv[2], per_device_train_batch_size=8, max_steps=4, report_to="none")
    Trainer(model, arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
