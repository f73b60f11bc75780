"""What benchmarks print and what is written about them: each figure is there, and is that of the kept file."""

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import harness

ROOT = Path(__file__).parents[2]
KEPT = sorted(path.stem for path in harness.RESULTS.glob("*.json"))


def chosen(**given):
    return argparse.Namespace(**{"keep": False, "json": True, "quick": True, **given})


def test_a_result_is_one_line_of_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    harness.finish("one", {"a": 1.5, "b": {"c": "left out by --quick"}}, {"more": None}, chosen(keep=True))
    harness.finish("one", {"a": 2.5, "b": {"c": 1}}, {}, chosen())
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first) == harness.kept("one") == {"a": 1.5, "b": {"c": "left out by --quick"}}
    assert json.loads(second) == {"a": 2.5, "b": {"c": 1}}


@pytest.mark.parametrize(
    "figures",
    [
        {"a": 1},
        {"a": 1, "b": None},
        {"a": 1, "b": {}},
        {"a": 1, "b": {"c": None}},
        {"a": None, "b": {"c": 1}},
        {"a": [1, None], "b": {"c": 1}},
        {"a": 1, "b": {"c": 1}, "new": None},
    ],
)
def test_a_result_that_lacks_a_figure_is_told_and_not_kept(figures, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    harness.finish("one", {"a": 1, "b": {"c": 2}}, {}, chosen(keep=True))
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"bench.one has no value for (a|b|new);"):
        harness.finish("one", figures, {}, chosen())
    assert json.loads(capsys.readouterr().out) == figures
    if None in figures.values():
        with pytest.raises(SystemExit):
            harness.finish("one", figures, {}, chosen(keep=True))
    assert harness.kept("one") == {"a": 1, "b": {"c": 2}}


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_result_is_whole_and_not_a_quick_one(name):
    whole = json.loads((harness.RESULTS / f"{name}.json").read_text())
    assert not whole["quick"]
    assert whole["machine"]["date"]
    assert not harness._lacks(harness.kept(name), None)


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", KEPT)
def test_a_quick_result_has_what_the_kept_one_has(name):
    if name == "spill_huge":
        pytest.skip("it takes 32 GB of disk and some minutes, also with --quick")
    command = [sys.executable, "-m", f"bench.{name}", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not harness._lacks(json.loads(done.stdout.splitlines()[-1]), harness.kept(name))


def test_threads_of_benchmarks_are_owned():
    for path in (ROOT / "bench").glob("*.py"):
        names = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not {"threading.Thread", "threading.Timer"} & names, path.name


# ---- what is written ----


def at(path):
    """The figure of a kept file that a path names."""

    def find(whole):
        for key in path.split("."):
            whole = whole[key]
        return whole

    return find


def turns(*path, of):
    """The least or the greatest ratio of the turns of an arm of bench.spill."""
    return lambda whole: of(memory_s / arm_s for memory_s, arm_s in at(".".join(path))(whole)["memory_and_arm_step_s"])


OVERHEAD = "details.step_ratio_spread", "details.start_ratio_spread"
CLAIMS = [
    (
        "README.md",
        r"train at (\S+) \((\S+) to (\S+) in four turns\) of the speed that enough memory gives",
        "spill",
        [at("throughput_vs_memory"), *(turns("details", "arms", "spill", of=one) for one in (min, max))],
    ),
    (
        "README.md",
        r"it loses \((\S+) with 64 of them, (\S+) to (\S+)\)",
        "spill",
        [at("small_batch"), *(turns("details", "small", "spill", of=one) for one in (min, max))],
    ),
    (
        "README.md",
        r"end (\S+) times as soon as with model parallelism, (\S+) times as soon as with GPipe and (\S+) times as soon "
        r"as one after another on each, at (\S+) of what is possible",
        "sharp",
        [at("vs_model_parallel"), at("vs_gpipe"), at("vs_static"), at("of_bound")],
    ),
    (
        "README.md",
        r"\| median step .* \| (\S+) of (\S+) ms \(turns of 25 steps: (\S+) to (\S+)\)",
        "overhead",
        [
            at("step_ratio"),
            lambda whole: 1000 * whole["details"]["plain_step_s"],
            at(f"{OVERHEAD[0]}.min"),
            at(f"{OVERHEAD[0]}.max"),
        ],
    ),
    ("README.md", r"\| mean step, same run \| (\S+) \|", "overhead", [at("details.mean_step_ratio")]),
    (
        "README.md",
        r"\| from the command .* \| (\S+) of (\S+) s \((\S+) pairs: (\S+) to (\S+)\)",
        "overhead",
        [
            at("start_ratio"),
            at("details.plain_start_s"),
            at("details.pairs"),
            at(f"{OVERHEAD[1]}.min"),
            at(f"{OVERHEAD[1]}.max"),
        ],
    ),
    (
        "README.md",
        r"\| (\S+) tasks on (\S+) simulated devices, journal on \| (\S+) s, (\S+) events a second, (\S+) times as long",
        "control",
        [at("tasks"), at("devices"), at("wall_s"), at("events_per_s"), at("growth")],
    ),
    (
        "docs/architecture.md",
        r"In `bench.spill` the speed is (\S+) of that in memory",
        "spill",
        [at("throughput_vs_memory")],
    ),
    ("docs/architecture.md", r"left to the bound in `bench.sharp` \((\S+) of it\)", "sharp", [at("of_bound")]),
]


@pytest.mark.parametrize(("document", "pattern", "name", "figures"), CLAIMS)
def test_what_is_written_is_what_was_kept(document, pattern, name, figures):
    found = re.search(
        pattern,
        " ".join((ROOT / document).read_text().split()) if "|" not in pattern else (ROOT / document).read_text(),
    )
    assert found, f"{document} does not say {pattern!r} any more; change this test with it"
    whole = json.loads((harness.RESULTS / f"{name}.json").read_text())
    for text, figure in zip(found.groups(), figures, strict=True):
        plain = text.replace(",", "")
        digits = len(plain.partition(".")[2]) or len(plain.rstrip("0")) - len(plain)
        assert float(plain) == round(figure(whole), digits), f"{document} says {text}"


def test_each_row_of_what_it_costs_is_compared():
    table = re.search(r"\| what \| figure \|\n\|---\|---\|\n((?:\|.*\n)+)", (ROOT / "README.md").read_text())
    for row in table[1].splitlines():
        assert any(re.search(pattern, row) for _, pattern, _, _ in CLAIMS), row
