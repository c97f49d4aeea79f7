"""`autotune estimate --devices`: the ways to share several devices, and how they compare."""

from __future__ import annotations

import re

import pytest
from answers import drawn
from factories import VERSIONS, make_facts, make_workload
from profiles import make_group, make_profile, make_storages

from autotune.cost.family import Family
from autotune.cost.profile import Profile
from autotune.errors import InputError, NothingFitsError
from autotune.estimates.estimate import report
from autotune.estimates.forecast import Question
from autotune.estimates.many_devices import spread, ways
from autotune.estimates.report import ConfigReport, SpreadReport
from autotune.estimates.request import check, nodes_of, target_of
from autotune.output.estimate_table import estimate_table
from autotune.planning.options import EstimateOptions, options_of
from autotune.units import GIB
from autotune.values.config import Parallelism

PARTS = {"tensor_parallel_heads": 4, "layers": 4, "parameters": 4_000_000}


class AnyFamily(dict[Family, Profile]):
    """A model of four layers of 4 MB each, whatever the family: nothing is traced."""

    def get(self, family: Family, _default: object = None) -> Profile:
        width = 4 if family.dtype == "float32" else 2
        layer = make_group(1000, 1000, element_bytes=width)
        return make_profile(
            family, parameters=(layer.model_copy(update={"count": 4}),), layer=(layer,), layers=4,
            storages=make_storages((0, 3, 0, 1e6), (2, 3, 1, 0, True)), hidden_bytes=1e5,
        )  # fmt: skip

    __missing__ = get


def spread_over(**fields) -> SpreadReport:
    """Spread a hand-made model over four A100s unless options say otherwise."""
    options = options_of(EstimateOptions, {"model": "tiny", "gpu": "a100-80gb", "devices": 4, **fields})
    check(options)
    workload = make_workload(global_batch_size=options.global_batch or 64)
    question = Question(options, workload, make_facts(**PARTS), AnyFamily())
    target = target_of(options)
    hardware = target.device.hardware
    versions = {**hardware.versions, **VERSIONS}  # a transformers that has all ways
    device = target.device.model_copy(update={"hardware": hardware.model_copy(update={"versions": versions})})
    target = target.model_copy(update={"device": device})
    return spread(question, target.with_packages(options.point), ())


@pytest.fixture(scope="module")
def compared() -> SpreadReport:
    return spread_over()


def test_every_way_has_a_row_with_all_samples_or_a_reason_and_the_fastest_is_first(compared):
    names = {row.way for row in compared.rows}
    assert {"ddp", "zero_1", "zero_2", "zero_3", "fsdp_full", "fsdp_grad_op", "zero_2, states on cpu"} <= names
    assert {"fsdp_full, TP 2", "TP 4"} <= names
    assert not names & {name for names in compared.refused.values() for name in names}
    rates = [row.predicted.speed.samples_per_second for row in compared.rows if row.fits_at_all]
    assert rates == sorted(rates, reverse=True)
    for row in compared.rows:
        config = row.predicted.config
        ranks = config.parallelism.data_parallel
        assert ranks * config.per_device_train_batch_size * row.predicted.accumulation_steps == 64
        begins_on_host = config.parallelism.sharding.startswith("fsdp")
        assert (row.host_bytes > 0) == (begins_on_host or config.parallelism.offload != "none")


def test_the_table_is_80_columns_wide_and_names_every_way(compared):
    text = drawn(estimate_table(compared), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(row.way.partition(" on ")[0] in text for row in compared.rows)  # the rest may stand in the next line
    assert "4 x a100-80gb in one node" in text
    assert "?: probably, though its interval reaches beyond the memory" in " ".join(text.split())
    (row,) = [row for row in compared.rows if row.way == "ddp"]
    for chance, is_sure in ((0.98, False), (0.995, True)):
        unsure = row.predicted.model_copy(update={"fits": "probably", "chance_to_fit": chance})
        rows = (row.model_copy(update={"predicted": unsure}),)
        shown = drawn(estimate_table(compared.model_copy(update={"rows": rows})), 120)
        assert ("? " not in shown) == is_sure


def test_a_column_in_which_nothing_is_known_is_left_out(compared):
    def headings(report):
        return next(
            line for line in drawn(estimate_table(report), 120).splitlines() if line.strip().startswith("way")
        ).split()

    def without_mfu(row):
        speed = row.predicted.speed.model_copy(update={"mfu": None, "mfu_interval": None})
        return row.model_copy(update={"predicted": row.predicted.model_copy(update={"speed": speed})})

    unknown = compared.model_copy(update={"rows": tuple(map(without_mfu, compared.rows))})
    assert "MFU" in headings(compared)
    assert headings(unknown) == [heading for heading in headings(compared) if heading != "MFU"]


def test_more_nodes_are_slower_and_said():
    one, two = (spread_over(nodes=n, fix="sharding=zero_3") for n in (1, 2))
    rates = [report.rows[0].predicted.speed.samples_per_second for report in (one, two)]
    assert rates[1] < rates[0]
    assert (one.network_gb_s, two.network_gb_s) == (None, pytest.approx(2 * 25 * 0.8))
    assert "200 Gb/s a device (--network-gb-s)" in " ".join(two.notes)


def test_where_nothing_fits_the_nearest_is_said():
    for options, words in (
        ({"host_memory_bytes": 1 << 10, "fix": "offload=optimizer"}, "of each node's memory it takes"),
        ({"memory_bytes": GIB}, r"nothing fits 4 devices: .* comes nearest"),
    ):
        with pytest.raises(NothingFitsError, match=words):
            spread_over(**options)


@pytest.mark.slow
def test_if_nothing_fits_the_adapter_that_would_is_named_and_can_be_pasted():
    """Of 6,700 million weights, with gradients and states, no half fits 24 GB; frozen in 16 bits they take 12.6 GiB."""
    options = {"model": "llama-2-7b", "gpu": "rtx-4090", "devices": 2, "host_memory_bytes": GIB, "allow": "optimizer"}
    with pytest.raises(NothingFitsError) as error:
        report(options_of(EstimateOptions, options))
    found = re.search(r"with --fix (\S+) (.*) takes \S+ GiB, which (probably )?fits$", str(error.value))
    again = report(options_of(EstimateOptions, {**options, "allow": None, "fix": found[1]}))
    assert found[2] in {row.way for row in again.rows if row.fits_at_all}


def test_a_batch_that_is_too_small_for_all_ranks_is_a_reason_and_knobs_without_a_way_are_refused():
    with pytest.raises(InputError, match="the knobs given contradict each other"):
        spread_over(fix="tensor-parallel=3")
    found = spread_over(global_batch=2)
    assert "ddp" in found.refused["4 devices don't share a global batch of 2"]
    assert "TP 4" in {row.way for row in found.rows}


@pytest.mark.slow
def test_a_way_that_is_given_is_estimated_by_component(tiny_llama):
    options = {"model": str(tiny_llama), "seq_len": 128, "gpu": "a100-80gb", "devices": 4}
    found = report(options_of(EstimateOptions, {**options, "fix": "sharding=fsdp_full,micro-batch=2"}))
    assert isinstance(found, ConfigReport)
    assert found.predicted.memory.communication_bytes > 0
    assert found.predicted.parts["other devices"] > 0
    assert found.largest_micro_batch == 16


def test_nodes_hold_eight_devices_unless_they_are_counted():
    assert [nodes_of(n, None) for n in (2, 8, 16, 64)] == [1, 1, 2, 8]
    assert nodes_of(64, 16) == 16


FACTS = make_facts(layers=12, tensor_parallel_heads=8)


def ways_of(devices: int = 64, per_node: int = 8, facts=FACTS, **point) -> tuple[Parallelism, ...]:
    return ways(devices, per_node, facts, {f"parallelism.{name}": value for name, value in point.items()})


def test_degrees_multiply_to_the_devices_and_no_way_comes_twice():
    found = ways_of()
    assert {way.sharding_ranks * way.tensor_parallel * way.replicas for way in found} == {64}
    assert len(set(found)) == len(found)
    assert {way.sharding for way in found} == {"none", "zero_1", "zero_2", "zero_3", "fsdp_grad_op", "fsdp_full"}
    assert {(w.sharding, w.offload) for w in found if w.offload != "none"} >= {("zero_2", "optimizer")}


def test_tensor_parallel_stays_inside_a_node_and_divides_the_heads():
    for options, degrees in (
        ({}, {1, 2, 4, 8}),  # inside a node, dividing the heads
        ({"per_node": 2}, {1, 2}),
        ({"facts": make_facts(layers=12, tensor_parallel_heads=6)}, {1, 2}),
        ({"facts": make_facts(layers=12)}, {1}),  # its class has no plan
        ({"tensor_parallel": 4}, {4}),
    ):
        assert {way.tensor_parallel for way in ways_of(**options)} == degrees


def test_fsdp_may_keep_a_replica_on_each_node_or_as_many_as_are_given():
    assert {(w.sharding, w.replicas) for w in ways_of() if w.replicas > 1} == {("fsdp_full", 8), ("fsdp_grad_op", 8)}
    assert {w.replicas for w in ways_of(devices=8, per_node=8)} == {1}
    assert {w.replicas for w in ways_of(devices=8, per_node=8, replicas=2)} == {2}
    assert {w.replicas for w in ways_of(replicas=1)} == {1}


def test_given_knobs_are_kept_and_sequence_parallel_stays_inside_a_node_and_beside_shards():
    beside = ("zero_3", "fsdp_full")
    assert {way.sharding for way in ways_of(sharding="zero_2")} == {"zero_2"}
    assert {way.ddp_bucket_cap_mb for way in ways_of(ddp_bucket_cap_mb=50)} == {50}
    shared = {(w.sequence_parallel, w.data_parallel, w.sharding) for w in ways_of() if w.sequence_parallel > 1}
    assert shared == {(degree, 64 // degree, sharding) for degree in (2, 4, 8) for sharding in beside}
