"""Device kinds: their figures are sane, and what they cost the simulator is what the figures say."""

import itertools

import pytest

from rota.cluster.kinds import CPU, KINDS, PEAK, USUAL, arithmetic_of, costs_of, find_kind, usable_bytes
from rota.plan.collectives import Link
from rota.plan.costs import Calibration, Costs, LinkCost, Rate
from rota.plan.layout import Kind


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_more_exact_arithmetic_is_never_faster(kind):
    rates = [kind.flops(how) for how in ("half", "tf32", "float32", "float64")]
    assert all(a >= b > 0 for a, b in itertools.pairwise(rates))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_units_are_right(kind):
    """A slip of a thousand would show here."""
    if kind is CPU:
        return
    assert 8e12 <= kind.float32_flops <= 1e14
    assert 6e13 <= kind.half_flops <= 1e15
    assert 2e11 <= kind.memory_bytes_per_s <= 4e12
    assert 1e10 <= kind.link_bytes_per_s <= 1e12
    assert 15 * 2**30 <= kind.memory_bytes <= 81 * 2**30


def test_the_kinds_that_people_have_are_there():
    names = ("V100-32GB", "A100-40GB", "A100-80GB", "H100-80GB", "T4", "L4", "A10G", "RTX3090", "RTX4090", "cpu")
    assert set(names) == set(KINDS)


def test_at_peak_a_v100_is_what_bench_plans_has_always_taken():
    """Single precision that stands for half: every byte counts half."""
    cost = LinkCost(group=2, launch_s=5e-6, launch_byte_s=0.0, latency_s=1e-5, byte_s=1 / 300e9)
    kinds = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.SEND)
    found = costs_of(KINDS["V100-32GB"], arithmetic="half", reach=PEAK, byte_share=0.5)
    assert found == Costs(
        link=Link(latency_s=1e-5, bandwidth_bytes_per_s=300e9),
        calibration=Calibration(
            calls={},
            rest=Rate(op_s=5e-6, flop_s=1 / 125e12, byte_s=1 / (2 * 900e9), backward=2.0),
            links=dict.fromkeys(kinds, (cost,)),
            optimizer=((0, 0.0), (2**30, 0.0)),
        ),
    )


def test_an_op_reaches_the_stated_part_of_the_peak():
    kind = KINDS["A100-40GB"]
    for how, part in (("half", USUAL.tensor_products), ("tf32", USUAL.tensor_products), ("float32", 0.85)):
        rate = costs_of(kind, arithmetic=how).calibration.rest
        assert rate.flop_s == pytest.approx(1 / (part * kind.flops(how)))
        assert rate.byte_s == pytest.approx(1 / (USUAL.memory * kind.memory_bytes_per_s))


def test_convolutions_in_float32_use_tf32_as_pytorch_does():
    known = costs_of(KINDS["A100-40GB"]).calibration
    assert known.rates["conv2d"].flop_s < known.rest.flop_s
    assert costs_of(KINDS["A100-40GB"], arithmetic="tf32").calibration.rates == {}


def test_another_link_makes_communication_slower_and_nothing_else():
    near, far = costs_of(KINDS["T4"]), costs_of(KINDS["T4"], link_bytes_per_s=1e9, latency_s=5e-5)
    assert far.link.bandwidth_bytes_per_s < near.link.bandwidth_bytes_per_s
    assert far.calibration.links[Kind.SEND][0].latency_s == 5e-5
    assert far.calibration.rest == near.calibration.rest


def test_some_memory_is_not_for_tensors_but_a_cpu_worker_gets_what_it_is_given():
    assert usable_bytes(KINDS["A100-40GB"]) < 40 * 2**30
    assert usable_bytes(CPU) == CPU.memory_bytes


def test_how_products_are_computed():
    assert arithmetic_of("float32") == "float32"
    assert arithmetic_of("float32", float32_matmul="high") == "tf32"
    assert arithmetic_of("bfloat16") == "half"
    assert arithmetic_of("float64") == "float64"


def test_a_kind_is_found_in_any_case_and_a_near_name_is_suggested(refused):
    assert find_kind("a100-40gb").name == "A100-40GB"
    sentence = refused(find_kind, "A100-40G")
    assert "did you mean A100-40GB" in sentence
    assert all(name in sentence for name in KINDS)
