"""Cluster files: what they describe, and one clear sentence for every mistake."""

import pytest

from rota.cluster.file import load_cluster, parse_what_if
from rota.errors import InputError

GOOD = """
[[node]]
name = "big"
kind = "A100-40GB"
devices = 8
count = 2
price = 4.10

[[node]]
kind = "mine"
devices = 2

[link]
bandwidth = "12.5GB/s"
latency_us = 10

[kind.mine]
flops = 100e12
memory = "24GiB"
memory_bandwidth = "900GB/s"
link_bandwidth = "32GB/s"
"""


@pytest.fixture
def load(tmp_path):
    def call(text):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return load_cluster(path)

    return call


def test_nodes_kinds_and_links_are_read(load):
    site = load(GOOD)
    assert [node.name for node in site.nodes] == ["big0", "big1", "node2"]
    assert site.nodes[0].devices[:2] == ("big0:0", "big0:1")
    assert (site.nodes[0].price_per_hour, site.nodes[2].price_per_hour) == (4.1, 0.0)
    assert site.nodes[2].memory_bytes == 24 * 2**30
    mine = site.kinds["mine"]
    assert (mine.float32_flops, mine.half_flops) == (100e12, 100e12)
    assert (mine.memory_bytes_per_s, mine.link_bytes_per_s) == (900e9, 32e9)
    assert (site.link.bytes_per_s, site.link.latency_s) == (12.5e9, pytest.approx(1e-5))
    assert site.words() == "2 x 8 A100-40GB, 2 mine"


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("12.5GB/s", 12.5e9), ("100Gbit/s", 12.5e9), ("100 Gbitps", 12.5e9), ("1GiB/s", 2**30), ("800 MB / s", 8e8)],
)
def test_bandwidths(load, text, bytes_per_s):
    site = load(f'[[node]]\nkind = "T4"\ndevices = 1\n[link]\nbandwidth = "{text}"')
    assert site.link.bytes_per_s == bytes_per_s


NODE = '[[node]]\nkind = "T4"\ndevices = 2\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there are no nodes"),
        ("node = []", "there are no nodes"),
        ("[[node]\nkind", "line 1"),
        (NODE + "price = = 3", "line 4"),
        ('[[node]]\nkind = "A100-40G"\ndevices = 1', "did you mean A100-40GB"),
        ('[[node]]\nkind = "abacus"\ndevices = 1', "known: V100-32GB"),
        ("[[node]]\nkind = 4\ndevices = 1", "kind must be a text"),
        ('[[node]]\nkind = "T4"', "has no devices"),
        ("[[node]]\ndevices = 4", "has no kind"),
        ('[[node]]\nkind = "T4"\ndevice = 4', "did you mean devices"),
        ('[[node]]\nkind = "T4"\ndevices = 0', "devices must be a whole number"),
        ('[[node]]\nkind = "T4"\ndevices = "8"', "devices must be a whole number"),
        ('[[node]]\nkind = "T4"\ndevices = true', "devices must be a whole number"),
        (NODE + "count = -1", "count must be a whole number"),
        (NODE + "price = -2", "price must be a number"),
        (NODE + "price = nan", "price must be a number"),
        (NODE + "name = 3", "name must be a text"),
        (NODE + 'name = "a"\n' + NODE + 'name = "a"', "two nodes are named 'a'"),
        (NODE + "[link]\nspeed = 3", "'speed'"),
        (NODE + '[link]\nbandwidth = "100Gb/s"', "12.5GB/s or 100Gbit/s"),
        (NODE + '[link]\nbandwidth = "fast"', "not a bandwidth"),
        (NODE + "[link]\nlatency_us = -1", "latency_us must be a number"),
        (NODE + "[kind.mine]\nflops = 1e12", "has no memory and no memory_bandwidth"),
        (NODE + '[kind.T4]\nflops = 1e12\nmemory = "1GiB"\nmemory_bandwidth = "1GB/s"', "choose another"),
        (NODE + '[kind.mine]\nflops = "fast"\nmemory = "1GiB"\nmemory_bandwidth = "1GB/s"', "flops must be a number"),
        (NODE + '[kind.mine]\nflops = 1e12\nmemory = "much"\nmemory_bandwidth = "1GB/s"', "is not a size"),
        ("kind = 3\n" + NODE, "kind must be a table"),
        ("[[nodes]]\nx = 1", "did you mean node?"),
    ],
)
def test_every_mistake_is_one_sentence_that_names_the_file(load, refused, text, words):
    sentence = refused(load, text)
    assert "cluster.toml" in sentence
    assert words in sentence


def test_a_file_that_is_not_there_or_not_text(refused, tmp_path):
    assert "there is no cluster file" in refused(load_cluster, tmp_path / "no.toml")
    assert "cannot be read" in refused(load_cluster, tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    assert "is not text" in refused(load_cluster, tmp_path / "bytes.toml")


def test_what_if_adds_a_node_with_the_price_of_its_kind(load):
    site = load(GOOD)
    asked = parse_what_if("+4xA100-40GB", site)
    (node,) = asked.nodes
    assert (node.kind, len(node.devices), node.price_per_hour, asked.note) == ("A100-40GB", 4, 4.1, "")
    assert len(site.plus(asked.nodes).nodes) == 4
    assert len({one.name for one in site.plus(asked.nodes).nodes}) == 4


def test_what_if_of_several_nodes(load):
    asked = parse_what_if("+2 nodes of 8xH100", load(GOOD))
    assert [(node.kind, len(node.devices)) for node in asked.nodes] == [("H100-80GB", 8)] * 2
    assert asked.note == ""


def test_the_beginning_of_a_name_is_the_kind_that_is_there_or_the_smallest(load):
    assert parse_what_if("+1xA100", load(GOOD)).nodes[0].kind == "A100-40GB"
    other = load('[[node]]\nkind = "A100-80GB"\ndevices = 1')
    asked = parse_what_if("+1xa100", other)
    assert asked.nodes[0].kind == "A100-80GB"
    assert asked.note == "a100 is taken as A100-80GB"
    assert parse_what_if("+1xA100", load(NODE)).nodes[0].kind == "A100-40GB"


@pytest.mark.parametrize("text", ["4xA100", "+A100", "+0xA100", "+4xA100 +4xT4", "", "+-1xT4", "+0 nodes of 8xT4"])
def test_a_what_if_that_cannot_be_read(load, text):
    with pytest.raises(InputError, match="--what-if"):
        parse_what_if(text, load(NODE))


def test_a_what_if_of_an_unknown_kind(load, refused):
    assert "did you mean A100-40GB" in refused(parse_what_if, "+4xB100-40GB", load(NODE))
