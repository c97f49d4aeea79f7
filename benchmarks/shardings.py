"""Holds the predicted time and memory of every sharding of a training against trials on the CPU, by gloo.

    python benchmarks/shardings.py [--devices 2] [--nodes 1] [--rate 800mbit] [--rounds 2]

With `--nodes 2` the processes are shared by two nodes of a Ray cluster: this machine, and a network namespace at the
other end of a line whose rate `tc` limits both ways (needs root). Each sharding is predicted as a search predicts it
before its first trial, by the network's rate that was measured at the start. Then each is measured in rounds. The last
line is the result as JSON: among it the rank correlation (Spearman) of predicted and measured rates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from provenance import error_figures, keep

from autotune.api import planned, subject_of
from autotune.output.progress import observing
from autotune.planning.options import SearchOptions, options_of
from autotune.planning.plan import request_of
from autotune.search.cost_model import cost_model
from autotune.search.run import backend_of
from autotune.storage.run_directory import RunDirectory
from autotune.values.time_spent import Stopwatch
from autotune.values.trial import Purpose

SPACE, LINE, FAR_END, HERE, THERE = "shardings", "shardings-0", "shardings-1", "10.78.0.1", "10.78.0.2"
# 21 million parameters, so that a step's gradients take 84 MB and its products a few tenths of a second.
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 512,
    "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="processes of a training (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="that share them, 1 or 2 (default: %(default)s)")
    parser.add_argument("--rate", default="800mbit", help="of the line between two nodes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of measuring all shardings (default: %(default)s)")
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (scratch / "model").mkdir()
        (scratch / "model" / "config.json").write_text(json.dumps(MODEL))
        only = ("sharding", "micro-batch")  # accelerate has neither FSDP nor tensor parallel on a CPU
        given: dict[str, Any] = {"device": "cpu", "devices": asked.devices, "space": "parallel", "only": only}
        given |= {"effort": "thorough", "allow": "numerics", "seq_len": 64, "global_batch": 8}
        if asked.nodes == 2:
            each = -(-asked.devices // 2)
            given |= {"nodes": 2, "address": stack.enter_context(cluster(asked.rate, each, scratch))}
        subject = subject_of(options_of(SearchOptions, {**given, "model": str(scratch / "model")}))
        heard = stack.enter_context(observing(None))
        directory = stack.enter_context(RunDirectory.create(scratch / "run"))
        backend = stack.enter_context(backend_of(subject.options.fleet, directory.path, device="cpu"))
        plan = planned(subject, directory, backend, heard, Stopwatch("planning"))
        model = cost_model(plan, backend.asker, directory.path, heard)
        assert model is not None
        configs = [c for c in plan.every_config() if c.parallelism.world_size == asked.devices]
        predicted = model.predict(configs)
        runs: dict[str, list[Any]] = {}
        for number in range(asked.rounds):
            for at, config in enumerate(configs):
                request = request_of(plan, config, Purpose.SEARCH, number=number * len(configs) + at, timeout_s=400)
                runs.setdefault(name(config), []).append(backend.pool.run(request))
                print(number, name(config), runs[name(config)][-1].outcome, file=sys.stderr, flush=True)
        hardware = plan.hardware
    rows: list[dict[str, Any]] = []
    for at, config in enumerate(configs):
        found = [run.measurement for run in runs[name(config)] if run.measurement is not None]
        if not found:
            rows.append({"sharding": name(config), "failed": str(runs[name(config)][0].outcome)[:300]})
            continue
        rate = statistics.fmean(measured.samples_per_second for measured in found)
        peak = max(measured.memory.resident_bytes or 0 for measured in found)
        rows.append({
            "sharding": name(config),
            "samples_per_second": [round(measured.samples_per_second, 3) for measured in found],
            "predicted": round(float(predicted.samples_per_second[at]), 3),
            "time_error": round(rate / float(predicted.samples_per_second[at]) - 1, 3),
            "peak_mib": round(peak / 2**20),
            "memory_error": round(float(predicted.needed_bytes[at]) / peak - 1, 3),
        })  # fmt: skip
    known = [row for row in rows if "predicted" in row]
    ranks = [
        np.argsort(np.argsort([np.mean(row[key]) for row in known])) for key in ("samples_per_second", "predicted")
    ]
    figures = {key: error_figures([row[f"{key}_error"] for row in known], 3) for key in ("time", "memory")}
    correlation = round(float(np.corrcoef(*ranks)[0, 1]), 3)
    network = {"network_gb_s": hardware.network_gb_s, "rate": asked.rate if asked.nodes == 2 else None}
    summary = {"devices": asked.devices, "nodes": asked.nodes, **network, "rank_correlation": correlation, **figures}
    keep(f"shardings-{asked.devices}-on-{asked.nodes}", hardware, {**summary, "rows": rows})


def name(config: Any) -> str:
    return f"{config.parallelism.sharding}, micro-batch {config.per_device_train_batch_size}"


@contextlib.contextmanager
def cluster(rate: str, cpus: int, scratch: Path) -> Iterator[str]:
    """Yield the address of a cluster of two nodes that are joined by a line of this rate."""

    def ip(*words: str, command: str = "ip") -> None:
        subprocess.run([command, *words], check=True)

    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    ip("netns", "add", SPACE)
    try:
        ip("link", "add", LINE, "type", "veth", "peer", "name", FAR_END, "netns", SPACE)
        ip("addr", "add", f"{HERE}/24", "dev", LINE)
        ip("-n", SPACE, "addr", "add", f"{THERE}/24", "dev", FAR_END)
        for words in (["link", "set", LINE], ["-n", SPACE, "link", "set", FAR_END], ["-n", SPACE, "link", "set", "lo"]):
            ip(*words, "up")
        limit = ["root", "tbf", "rate", rate, "burst", "1mb", "latency", "2s"]
        ip("qdisc", "add", "dev", LINE, *limit, command="tc")
        ip("-n", SPACE, "qdisc", "add", "dev", FAR_END, *limit, command="tc")
        with socket.create_server((HERE, 0)) as free:
            address = f"{HERE}:{free.getsockname()[1]}"
        start = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", str(cpus)]
        # Nodes have cores of their own; on the same ones, two ranks that compute at once are several times slower.
        cores = sorted(map(str, os.sched_getaffinity(0)))
        ours, theirs = (["taskset", "--cpu-list", ",".join(cores[half::2]), *start] for half in (0, 1))
        port = address.rpartition(":")[2]
        head = [*ours, "--head", "--node-ip-address", HERE, "--port", port, "--include-dashboard", "false"]
        node = ["ip", "netns", "exec", SPACE, *theirs, "--address", address, "--node-ip-address", THERE]
        with contextlib.ExitStack() as stack:
            for number, command in enumerate((head, node)):
                log = stack.enter_context((scratch / f"ray-{number}.txt").open("w"))
                running = subprocess.Popen(command, stdout=log, stderr=log)
                stack.callback(running.wait)
                stack.callback(running.terminate)
                while "Ray runtime started" not in (scratch / f"ray-{number}.txt").read_text():
                    assert running.poll() is None, (scratch / f"ray-{number}.txt").read_text()
                    time.sleep(0.1)
            yield address
    finally:
        subprocess.run(["ip", "link", "del", LINE])
        subprocess.run(["ip", "netns", "del", SPACE])


if __name__ == "__main__":
    main()
