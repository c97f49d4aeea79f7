"""What DeepSpeed compiles is known before a trial, and the lock of a builder that was killed holds nobody up."""

import os
import time

import pytest
from factories import make_config, make_request

from autotune.execution import compiled_ops
from autotune.values.config import Parallelism


def needed(device: str = "cpu", **spread: str) -> tuple[str, ...]:
    config = make_config(parallelism=Parallelism(world_size=2, **spread))
    return compiled_ops.needed(make_request(config, device=device))


def test_deepspeed_alone_compiles_anything():
    assert needed() == needed(sharding="fsdp_full", offload="parameters") == ()


def test_messages_are_compiled_on_a_cpu_and_the_optimizer_of_the_host_wherever_something_is_offloaded():
    assert needed(sharding="zero_1") == ("ShareMemCommBuilder",)
    assert needed(sharding="zero_2", offload="optimizer") == ("ShareMemCommBuilder", "CPUAdamBuilder")
    assert needed("cuda:0", sharding="zero_3") == ()
    assert needed("cuda:0", sharding="zero_3", offload="parameters") == ("CPUAdamBuilder",)


@pytest.mark.parametrize(("age_s", "is_left"), [(60.0, True), (2 * compiled_ops.LIMIT_S, False)])
def test_only_the_lock_of_a_dead_builder_is_removed(age_s, is_left, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "some_op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    then = time.time() - age_s
    os.utime(lock, (then, then))
    compiled_ops._forget_dead_builder("some_op")
    assert lock.exists() == is_left
    compiled_ops._forget_dead_builder("another_op")
