"""Bad input on the command line and in environment variables, as data: words, and the exit code that they deserve."""

# Options of `autotune estimate` and `autotune find` beside those that are good, with values that no one can mean.
_NUMBERS = ("-1", "0", "1e25", "9" * 40, "nan", "inf", "x", "")
ESTIMATE = {
    **dict.fromkeys(("--images", "--image-size"), (*_NUMBERS, "2")),  # the models there see none
    **dict.fromkeys(("--seq-len", "--global-batch", "--nodes", "--network-gb-s"), _NUMBERS),
    **dict.fromkeys(("--target-len", "--devices", "--eval-batch", "--eval-samples"), _NUMBERS),
    **dict.fromkeys(("--memory", "--host-memory", "--tokens"), ("-1", "0", "nan", "inf", "x", "", "5 bananas")),
    "--gpu": ("abacus", "h1000", "", "0x a100-80gb", "-1x a100-80gb", "a100-80gb 7TB", "4x", "4x 4x a100-80gb"),
    "--task": ("chess", ""),
    "--device": ("abacus", "cuda:x", "cuda:-1"),
    "--allow": ("everything", ""),
    "--model": ("", "no/such/model", "gpt-99", "x" * 400, "https://example.org/model", "a b c", "/dev/null",
                "gpt2@main", "../gpt2", "llama-3-8", "t5-smal", "a/b/c", "-", "model\nname"),
}  # fmt: skip

# Values of `--fix`, with which one configuration is estimated.
FIX = {
    **dict.fromkeys(("micro-batch", "tensor-parallel", "prefetch"), _NUMBERS),
    **dict.fromkeys(("adapter-rank", "adapter-alpha", "adapter-virtual-tokens", "devices"), _NUMBERS),
    **dict.fromkeys(("empty-cache", "expert-capacity", "experts-per-token", "ddp-bucket-cap-mb"), _NUMBERS),
    **dict.fromkeys(("tf32", "liger", "pin-memory", "packing"), ("perhaps", "", "2", "none")),
    "ddp-find-unused": ("perhaps", "", "2", "true"),  # one device has none
    "ddp-broadcast-buffers": ("perhaps", "", "2", "true"),
    "workers": ("-1", "1e25", "9" * 40, "nan", "x", ""),
    "adapter-dropout": ("-1", "2", "nan", "x", ""),
    "precision": ("fp99", "FP32x", "", "none"), "optim": ("magic", "adam w", ""), "checkpointing": ("sometimes", ""),
    "attention": ("sideways", ""), "experts": ("none of them",), "compile": ("gcc",),
    "compile-mode": ("faster", "max-autotune"),  # nothing is compiled
    "adapter": ("glue",), "adapter-target-modules": ("everything",), "quantization": ("int3",),
    "sampling": ("alphabetical",), "sharding": ("zero_9",), "offload": ("everything",), "offload-to": ("the moon",),
    "fsdp-wrapping": ("paper",), "generation-batch": _NUMBERS, "bf16": ("perhaps", ""),
    "gradient_accumulation_steps": ("4",), "learning_rate": ("1e-4",), "": ("", "5"), "micro_batch_": ("4",),
}  # fmt: skip
FIND = {
    "--seed": ("-1", "4294967296", "9" * 30, "1.5", "x", ""),
    "--check-loss": ("-1", "9" * 20, "1000000000000", "x", ""), "--max-trials": ("0", "-1", "9" * 30, "x", ""),
    "--max-time": ("0", "-3m", "1e400", "nan", "soon", ""), "--train-steps": ("0", "-1", "9" * 30, "x"),
    "--train-tokens": ("0", "-1", "1e400", "many"), "--devices": ("0", "-1", "some"),
    "--nodes": ("0", "-1", "some", "2"), "--workers": ("0", "-1", "some"), "--report-to": ("carrier pigeon",),
    "--engine": ("steam",), "--kind": ("x",), "--address": ("x",), "--effort": ("heroic", ""),
    "--allow": ("everything",), "--seq-len": ("9" * 30, "0", "-1", "x"), "--target-len": ("8",),
    "--global-batch": ("many", "-8", "0", "1.5", "9" * 30), "--memory": ("24 bananas", "900TiB", "-1", "0"),
    "--text-field": ("text",), "--run-dir": ("x" * 300, "/dev/null/run", "m/config.json"),
    "--output": ("x" * 300, "no/such/place.json", "m"), "--space": ("defalt", "mine.yaml", "m", "x" * 300),
    "--data": ("nowhere.jsonl", "m", "x" * 300), "--baseline": ("nowhere.json", "m", "x" * 300),
    "--images": ("0", "-1", "x", "1"), "--image-size": ("0", "x", "64"),
    "--fix": ("precision", "=", "=5", "precision=", "micro-batch=4,micro-batch=8", "x" * 300, "precision=bf16;optim=x"),
    "--only": ("", "precison", "adapter.rank", ",", "gradient_accumulation_steps", "precision=bf16"),
    "--recipe": ("ppo", "", "SFT "), "--prompt-len": ("0", "-1", "x", "9" * 30, "8"),
    "--completion-len": ("0", "-1", "x", "9" * 30, "8"), "--generations": ("0", "-1", "x", "9" * 30, "4"),
    "--reward": ("x", "m:f", ""),
}  # fmt: skip

# Options of a recipe beside `--recipe`, on a model of a decoder.
RECIPES = (
    "--recipe sft --generations 4", "--recipe dpo --reward m:f", "--recipe grpo --generations 1",
    "--recipe grpo --reward nonsense", "--recipe grpo --reward :", "--recipe grpo --reward no_such_module:f",
    "--recipe grpo --reward json:no_such_function", "--recipe grpo --reward json:__doc__", "--recipe grpo --seq-len 64",
    "--recipe rloo --target-len 64", "--recipe sft --task token-classification", "--recipe kto --devices 2",
    "--recipe grpo --global-batch any", "--recipe grpo --global-batch 7", "--recipe grpo --check-loss 5",
    "--recipe sft --completion-len 1", "--recipe dpo --prompt-len 99999", "--recipe reward --completion-len 600",
    "--recipe sft --data nowhere.jsonl", "--recipe grpo --data m", "--recipe sft --images 1",
    "--recipe sft --freeze-vision", "--recipe grpo --fix packing=true", "--recipe sft --fix generation-batch=8",
    "--recipe dpo --fix adapter-rank=8 --fix adapter=none", "--recipe sft --devices all --workers 2",
    "--recipe sft --text-field nothing",
)  # fmt: skip

# What this machine lacks is exit code 3.
LACKING = {"--devices": ("100000", "9" * 30), "--workers": ("100000", "9" * 30), "--device": ("cuda:99",)}

# Whole command lines.
COMMANDS = (
    *(f"{name} --nonsense" for name in ("find", "estimate", "resume", "report", "explain", "export", "script")),
    *(f"{name} --nonsense" for name in ("doctor", "models", "gpus", "spaces", "history", "completion")),
    *("find", "estimate", "resume", "report", "explain", "export", "script", "completion"),
    "nonsense", "--nonsense", "report nowhere", "resume nowhere", "explain nowhere",
    "export nowhere --to python", "report . --format x", "report . -o x.zzz",
    "resume . --max-trials 0", "resume . --max-time x", "resume . --effort x", "explain . --max-time -1",
    "doctor --device x", "history sync nowhere", "history prune",
    "script -- python", "script -- python nowhere.py", "script -- torchrun x.py",
    "script --apply no.json -- python t.py",
    "find --model m --quiet --verbose", "report", "completion x",
    "estimate --model m --gpu a100-80gb --explain --quiet --seq-len 9999999", "estimate --explain --gpu a100-80gb",
    "estimate --model m --explain --gpu abacus", "estimate --model m --gpu a100-80gb --explain --fix precision=fp99",
    "estimate --model m --gpu a100-80gb --explain everything", "estimate --model m --gpu a100-80gb --eval-samples 8",
    "find --dry-run", "find --model m --device cpu --dry-run --space nowhere.yaml --quiet",
    "find --model m --device cpu --dry-run --fix precision=fp99", "find --model m --dry-run --device cuda:x",
    "find --model m --device cpu --dry-run --only nothing", "find --model m --device cpu --dry-run --data nowhere.txt",
    "find --model nothing-like-it --dry-run", "script --dry-run -- python nowhere.py", "script --dry-run --",
    "models nothing-like-it", "gpus abacus", "spaces nothing", "history forget nothing",
    "history forget", "history forget nothing", "history forget --all nothing", "history export no/such/folder/x.json",
    "export . --to", "export . --to nothing", "estimate m", "doctor --device abacus",
)  # fmt: skip

ENVIRONMENT = {
    "AUTOTUNE_RECORD": (
        "sqlite:///x.db?password=secret", "nonsense", "mysql://x", "sqlite://", "http://x", "sqlite:///x.db?timeout=abc",
        "sqlite:///x.db?mode=nonsense", "://", "postgresql://[::1", "\x01", f"sqlite:////{'x' * 300}",
    ),
}  # fmt: skip
