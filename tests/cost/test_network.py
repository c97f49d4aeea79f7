"""Which link a group of ranks is as slow as."""

from __future__ import annotations

import pytest
from factories import make_hardware

from autotune.cost.network import ADAPTER_GB_S, NETWORK_SHARE, NVLINK_SHARE, PCIE_SHARE, network_of
from autotune.values.catalogue.gpus import gpu_named, hypothetical

H100 = hypothetical(gpu_named("h100-80gb"))


def network(world: int = 64, nodes: int = 8, **fields):
    return network_of(H100, world, nodes=nodes, host_bandwidth=5e10, **fields)


def test_a_group_in_one_node_has_the_devices_own_link():
    assert network().channel(8, stride=1).bandwidth == 450e9 * NVLINK_SHARE
    assert network().channel(4, stride=2).bandwidth == 450e9 * NVLINK_SHARE


def test_all_devices_of_all_nodes_share_the_adapters_of_a_node():
    assert network().channel(64, stride=1).bandwidth == pytest.approx(8 * ADAPTER_GB_S * 1e9 * NETWORK_SHARE)
    assert network(gb_s=50).channel(64, stride=1).bandwidth == pytest.approx(50e9 * NETWORK_SHARE)


def test_beside_tensor_parallel_8_each_data_parallel_group_has_an_eighth_of_them():
    channel = network(gb_s=400).channel(8, stride=8)
    assert channel.bandwidth == pytest.approx(50e9 * NETWORK_SHARE)


def test_a_network_is_never_faster_than_the_devices_own_link():
    assert network(gb_s=10_000).channel(64, stride=1).bandwidth == 450e9 * NVLINK_SHARE


def test_other_nodes_answer_later():
    assert network().channel(64, stride=1).latency_s > network().channel(8, stride=1).latency_s


def test_pcie_attains_less_of_its_rate():
    l4 = network_of(hypothetical(gpu_named("l4")), 2, host_bandwidth=1e10)
    assert l4.link == 31.5e9 * PCIE_SHARE


def test_a_device_that_the_table_lacks_has_the_link_to_its_host():
    unknown = H100.model_copy(update={"name": "Some GPU"})
    assert network_of(unknown, 2, host_bandwidth=1e10).link == 1e10 * PCIE_SHARE


def test_processes_of_a_cpu_exchange_with_the_cores_that_compute():
    channel = network_of(make_hardware(), 2, host_bandwidth=1e10).channel(2, stride=1)
    assert not channel.overlaps
    assert channel.bandwidth < 1e10
