"""Bad input on the command line and in environment variables, as data: words, and the exit code that they deserve."""

from __future__ import annotations

# Options of `autotune estimate` and `autotune find` beside those that are good, with values that no one can mean.
_NUMBERS = ("-1", "0", "1e25", "9" * 40, "nan", "inf", "x", "")
ESTIMATE = {
    **dict.fromkeys(("--images", "--image-size"), (*_NUMBERS, "2")),  # the models there see none
    **dict.fromkeys(("--seq-len", "--global-batch", "--nodes", "--network-gb-s", "--micro-batch"), _NUMBERS),
    **dict.fromkeys(("--target-len", "--tensor-parallel", "--pipeline-parallel", "--prefetch"), _NUMBERS),
    **dict.fromkeys(("--adapter-rank", "--adapter-alpha", "--adapter-virtual-tokens", "--devices"), _NUMBERS),
    **dict.fromkeys(("--empty-cache", "--expert-capacity", "--experts-per-token", "--ddp-bucket-cap-mb"), _NUMBERS),
    **dict.fromkeys(("--memory", "--host-memory", "--tokens"), ("-1", "0", "nan", "inf", "x", "", "5 bananas")),
    "--workers": ("-1", "1e25", "9" * 40, "nan", "x", ""),
    "--adapter-dropout": ("-1", "2", "nan", "x", ""),
    "--precision": ("fp99", "FP32x", ""),
    "--optim": ("magic", "adam w", ""),
    "--checkpointing": ("sometimes", ""),
    "--attention": ("sideways", ""),
    "--experts": ("none of them",),
    "--compile": ("gcc",),
    "--compile-mode": ("faster",),
    "--adapter": ("glue",),
    "--quantization": ("int3",),
    "--sampling": ("alphabetical",),
    "--sharding": ("zero_9",),
    "--offload": ("everything",),
    "--offload-to": ("the moon",),
    "--fsdp-wrapping": ("paper",),
    "--gpu": ("abacus", "h1000", ""),
    "--task": ("chess", ""),
    "--device": ("abacus", "cuda:x", "cuda:-1"),
    "--allow": ("everything", ""),
    "--model": ("", "no/such/model", "gpt-99", "x" * 400, "https://example.org/model", "a b c", "/dev/null"),
}
FIND = {
    "--seed": ("-1", "4294967296", "9" * 30, "1.5", "x", ""),
    "--check-loss": ("-1", "9" * 20, "1000000000000", "x", ""),
    "--repeat": ("0", "-1", "2", "9" * 30, "x"),
    "--max-trials": ("0", "-1", "9" * 30, "x", ""),
    "--max-time": ("0", "-3m", "1e400", "nan", "soon", ""),
    "--train-steps": ("0", "-1", "9" * 30, "x"),
    "--train-tokens": ("0", "-1", "1e400", "many"),
    "--devices": ("0", "-1", "some"),
    "--workers": ("0", "-1", "some"),
    "--report-to": ("carrier pigeon",),
    "--engine": ("steam",),
    "--kind": ("x",),
    "--address": ("x",),
    "--effort": ("heroic", ""),
    "--allow": ("everything",),
    "--seq-len": ("9" * 30, "0", "-1", "x"),
    "--target-len": ("8",),
    "--global-batch": ("many", "-8", "0", "1.5", "9" * 30),
    "--memory": ("24 bananas", "900TiB", "-1", "0"),
    "--text-field": ("text",),
    "--run-dir": ("x" * 300, "/dev/null/run", "m/config.json"),
    "--output": ("x" * 300, "no/such/place.json", "m"),
    "--space": ("defalt", "mine.yaml", "m", "x" * 300),
    "--data": ("nowhere.jsonl", "m", "x" * 300),
    "--baseline": ("nowhere.json", "m", "x" * 300),
}

# What this machine lacks is exit code 3.
LACKING = {
    "--devices": ("100000", "9" * 30),
    "--workers": ("100000", "9" * 30),
    "--device": ("cuda:99",),
}

# Whole command lines.
COMMANDS = (
    *(f"{name} --nonsense" for name in ("find", "estimate", "resume", "report", "explain", "export", "script")),
    *(f"{name} --nonsense" for name in ("dashboard", "doctor", "models", "gpus", "spaces", "history", "completion")),
    *("find", "estimate", "resume", "report", "explain", "export", "script", "dashboard", "completion"),
    "nonsense", "--nonsense", "--json models", "report nowhere", "resume nowhere", "explain nowhere",
    "dashboard nowhere", "export nowhere --to python", "report . --format x", "report . -o x.zzz",
    "resume . --max-trials 0", "resume . --max-time x", "resume . --effort x", "explain . --max-time -1",
    "dashboard . --port 99999", "dashboard . --port x", "doctor --device x", "history sync nowhere", "history prune",
    "script -- python", "script -- python nowhere.py", "script -- torchrun x.py",
    "script --apply no.json -- python t.py",
    "find --model m --quiet --verbose", "report", "completion x",
)  # fmt: skip

ENVIRONMENT = {
    "AUTOTUNE_RECORD": (
        "sqlite:///x.db?password=secret", "nonsense", "mysql://x", "sqlite://", "http://x", "sqlite:///x.db?timeout=abc",
        "sqlite:///x.db?mode=nonsense", "://", "postgresql://[::1", "\x01", f"sqlite:////{'x' * 300}",
    ),
}  # fmt: skip
