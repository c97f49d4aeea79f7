"""LoRA: which adapter trains fastest, and what it saves against training all weights.

For whom: who fine-tunes with adapters, or wonders whether to. Shows a search space, `allow="method"` and an adapter
put on a model. How long: under five minutes, as effort "quick" has it; less with `--max-time`.

    python examples/lora.py [gpt2]
"""

from __future__ import annotations

import argparse

import autotune


def main() -> None:
    """Search among adapters, and put the winner on the model."""
    options = parse_options()
    result = autotune.find(
        options.model,
        space="lora",  # LoRA, rsLoRA and DoRA; `adapters` has every kind, `qlora` base weights in 4 or 8 bits too
        allow="method",  # an adapter is another way to train
        effort="quick",
        max_time=options.max_time,
    )

    fastest = {}  # trial of each adapter
    for trial in sorted(result.trials, key=lambda trial: trial.samples_per_second or 0.0):
        fastest[trial.config.adapter.shown if trial.config.adapter else "all weights"] = trial
    for way, trial in fastest.items():
        if trial.samples_per_second is not None:
            print(f"{way}: {trial.samples_per_second:.1f} samples/s, peak {trial.peak_bytes / 2**20:,.0f} MiB")
    print("what won:", result.best.config.adapter.shown if result.best.config.adapter else "training all weights")

    model = result.build_model()  # random weights; yours: AutoModelForCausalLM.from_pretrained(..., **model_kwargs())
    model = result.prepare_model(model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(f"trains {trained:,} of {result.facts.parameters:,} parameters")
    result.save("best-config.json")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="gpt2", help="catalogue name, directory or hub id")
    parser.add_argument("--max-time", help="of the search, such as 2m; by default what the effort stands for")
    return parser.parse_args()


if __name__ == "__main__":
    main()
