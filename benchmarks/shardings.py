"""Holds the predicted time and memory of every sharding of a training against trials on the CPU, by gloo.

    python benchmarks/shardings.py [--devices 2] [--nodes 1] [--mb-s 100] [--delay-ms 1] [--rounds 2]

With `--nodes 2` the processes are shared by two nodes of a Ray cluster: this machine, and a network namespace at the
other end of a line with this rate and delay each way (needs root). Each sharding is predicted as a search predicts it
before its first trial, by the network's rate that was measured at the start. Then each is measured in rounds. More
processes than cores, which a search refuses, share these. The last line is the result as JSON: among it the rank
correlation (Spearman) of predicted and measured rates.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any
from unittest import mock

import numpy as np
from measured_searches import planned_search
from provenance import error_figures, keep

from autotune.execution.places import spread
from autotune.output.progress import observing
from autotune.planning import planner
from autotune.search.cost_model import cost_model
from autotune.values.hardware import Hardware
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
    parser.add_argument("--mb-s", type=float, default=100, help="of the line between two nodes (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=1, help="of that line, each way (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of measuring all shardings (default: %(default)s)")
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (scratch / "model").mkdir()
        (scratch / "model" / "config.json").write_text(json.dumps(MODEL))
        only = ("sharding", "micro-batch")  # accelerate has neither FSDP nor tensor parallel on a CPU
        given: dict[str, Any] = {"device": "cpu", "devices": asked.devices, "space": "parallel", "only": only}
        given |= {"effort": "standard", "allow": "numerics", "seq_len": 64, "global_batch": 8}
        if asked.nodes == 2:
            each = -(-asked.devices // 2)
            address = stack.enter_context(cluster(asked.mb_s * 1e6, asked.delay_ms / 1e3, each, scratch))
            given |= {"nodes": 2, "address": address}
        heard = stack.enter_context(observing(None))
        stack.enter_context(mock.patch.object(planner, "spread", spread_over_any))
        search = planned_search({**given, "model": str(scratch / "model")}, heard)
        plan, backend, run_directory, _ = stack.enter_context(search)
        model = cost_model(plan, backend.asker, run_directory, heard)
        assert model is not None
        configs = [c for c in plan.every_config() if c.parallelism.world_size == asked.devices]
        predicted = model.predict(configs)
        runs: dict[str, list[Any]] = {}
        for number in range(asked.rounds):
            for at, config in enumerate(configs):
                request = plan.request_of(config, Purpose.SEARCH, number=number * len(configs) + at, timeout_s=400)
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
    line = {"network_gb_s": hardware.network_gb_s, "mb_s": asked.mb_s, "delay_ms": asked.delay_ms}
    summary = {"devices": asked.devices, "nodes": asked.nodes, "rank_correlation": correlation, **figures}
    summary |= line if asked.nodes == 2 else {}
    keep(f"shardings-{asked.devices}-on-{asked.nodes}", hardware, {**summary, "rows": rows})


def spread_over_any(hardware: Hardware, asked: Sequence[int], *, is_single: bool) -> tuple[Hardware, list[str]]:
    """Return what `places.spread` does, where there may be fewer cores than processes."""
    found, notes = spread(hardware.model_copy(update={"cores": max(asked)}), asked, is_single=is_single)
    return found.model_copy(update={"cores": hardware.cores}), notes


def name(config: Any) -> str:
    return f"{config.parallelism.sharding}, micro-batch {config.per_device_train_batch_size}"


@contextlib.contextmanager
def cluster(rate: float, delay_s: float, cpus: int, scratch: Path) -> Iterator[str]:
    """Yield the address of a cluster of two nodes that are joined by a line of `rate` bytes/s and this delay."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    ip("netns", "add", SPACE)
    try:
        ends = [tunnel(LINE), tunnel(FAR_END)]
        ip("link", "set", FAR_END, "netns", SPACE)
        ip("addr", "add", f"{HERE}/24", "dev", LINE)
        ip("-n", SPACE, "addr", "add", f"{THERE}/24", "dev", FAR_END)
        large = ["mtu", "65520", "up"]
        ip("link", "set", LINE, *large)
        ip("-n", SPACE, "link", "set", FAR_END, *large)
        ip("-n", SPACE, "link", "set", "lo", "up")
        for one, other in (ends, reversed(ends)):
            Thread(target=carry, args=(one, other, rate, delay_s), daemon=True).start()
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
        subprocess.run(["ip", "netns", "del", SPACE])


def tunnel(name: str) -> int:
    """Return the descriptor of a new network device, whose packets a process reads and writes."""
    found = os.open("/dev/net/tun", os.O_RDWR)
    set_interface, tun_without_header = 0x400454CA, 0x1001
    fcntl.ioctl(found, set_interface, struct.pack("16sH22x", name.encode(), tun_without_header))
    return found


def carry(source: int, target: int, rate: float, delay_s: float) -> None:
    """Pass packets on, each when those before it and its own bytes have passed at the rate, and after the delay."""
    passing: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def arrive() -> None:
        while True:
            due, packet = passing.get()
            time.sleep(max(0.0, due - time.monotonic()))
            os.write(target, packet)

    Thread(target=arrive, daemon=True).start()
    passed = 0.0
    while packet := os.read(source, 1 << 16):
        passed = max(passed, time.monotonic()) + len(packet) / rate
        passing.put((passed + delay_s, packet))


if __name__ == "__main__":
    main()
