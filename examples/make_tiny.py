"""Makes tiny models and small files of data, on which the other examples run in seconds and without a download.

    python examples/make_tiny.py tiny [--texts 1000] [--width 64] [--layers 2]

    tiny/llama, tiny/mixtral   decoders (the second has experts), random weights, a tokenizer with a chat template
    tiny/bert                  an encoder, random weights, a tokenizer that takes pairs
    tiny/texts.json            {"text": ...}, of varied length: to train a language model on
    tiny/pairs-train.csv, tiny/pairs-validation.csv
                               sentence1,sentence2,label: do the two belong together?
    tiny/chats.json            {"messages": [...]}: to fine-tune on conversations

All .json are JSON lines. The texts are those of make_texts.py; the tokenizers are trained on them.
"""

from __future__ import annotations

import argparse
import csv
import json
import sysconfig
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from make_texts import docstrings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 2000
LONGEST = 512
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")  # ids 0 to 3
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def main() -> None:
    """Make what the command line asks for."""
    options = parse_options()
    folder = options.folder
    texts = list(islice(docstrings(Path(sysconfig.get_path("stdlib"))), options.texts))
    folder.mkdir(parents=True, exist_ok=True)
    cuts = (text.partition("\n") for text in texts)
    pairs = [(first.strip(), rest.strip()) for first, _, rest in cuts if rest.strip()]

    write_lines(folder / "texts.json", ({"text": text} for text in texts))
    write_lines(folder / "chats.json", map(chat, pairs))
    held_out = max(1, len(pairs) // 10)
    write_pairs(folder / "pairs-train.csv", pairs[held_out:])
    write_pairs(folder / "pairs-validation.csv", pairs[:held_out])

    tokenizer = trained_tokenizer(texts)
    for name, figures in configs(options.width, options.layers).items():
        save_model(folder / name, figures, tokenizer)
    print(f"{folder}: {len(texts)} texts, {len(pairs)} pairs and chats; models: {', '.join(configs(1, 1))}")


def configs(width: int, layers: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each model."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": LONGEST,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    decoder = {**common, "num_key_value_heads": 2}
    return {
        "bert": {"model_type": "bert", **common},
        "llama": {"model_type": "llama", **decoder},
        "mixtral": {"model_type": "mixtral", **decoder, "num_local_experts": 4, "num_experts_per_tok": 2},
    }


def save_model(folder: Path, figures: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write a model with random weights and its tokenizer, as `from_pretrained` reads them."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(42)
    config = AutoConfig.for_model(**figures)
    is_encoder = config.model_type == "bert"
    (AutoModel if is_encoder else AutoModelForCausalLM).from_config(config).save_pretrained(folder)

    pad, unknown, start, end = SPECIAL
    if is_encoder:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A {end}",
            pair=f"{start} $A {end} $B:1 {end}:1",
            special_tokens=[(token, SPECIAL.index(token)) for token in (start, end)],
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unknown,
        bos_token=start,
        eos_token=end,
        cls_token=start if is_encoder else None,
        sep_token=end if is_encoder else None,
        chat_template=None if is_encoder else CHAT_TEMPLATE,
        model_max_length=LONGEST,
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if is_encoder else [])],
    ).save_pretrained(folder)


def trained_tokenizer(texts: list[str]) -> Tokenizer:
    """Return byte-level BPE, as GPT-2 and Llama 3 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def chat(pair: tuple[str, str]) -> dict[str, Any]:
    """Return a conversation: the first line is asked for the rest."""
    question, answer = pair
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> None:
    """Write CSV: every other first line with its own rest (1), the others with that of the pair before (0)."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentence1", "sentence2", "label"])
        for number, (first, rest) in enumerate(pairs):
            belongs = number % 2
            writer.writerow([first, rest if belongs else pairs[number - 1][1], belongs])


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to put it all")
    parser.add_argument("--texts", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=64, help="of the models (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the models (default: %(default)s)")
    options = parser.parse_args()
    if options.texts < 100:
        parser.error("--texts must be at least 100: the tokenizers learn from them")
    if options.width < 8 or options.width % 8:
        parser.error("--width must be a multiple of 8: four heads of an even size")
    return options


if __name__ == "__main__":
    main()
