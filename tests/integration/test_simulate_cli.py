"""`rota simulate` on a small sweep and small clusters, and what it says to wrong input."""

import json
import subprocess
import sys

import pytest

SWEEP = """
import torch
import torch.nn.functional as F

import rota
from rota.testing.models import GPT


def data():
    rows = torch.zeros((40, 17), dtype=torch.int64)
    return rota.Data(train=rows, batch_size=8)


def loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def task(width, lr):
    return rota.Task(
        name=f"w{width}-lr{lr:g}",
        model=lambda: GPT(vocabulary=32, context=16, width=width, depth=1, heads=2),
        data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        epochs=2000 if width == 32 else 4000,
    )


sweep = rota.grid(task, width=[32, 64], lr=[1e-3, 3e-4])
"""

CLUSTER = """
[[node]]
name = "box"
kind = "cpu"
devices = 2
price = 0.5
"""


@pytest.fixture
def simulate(command, monkeypatch, tmp_path):
    """Calls the command in this process, in a folder with a sweep and a cluster; gives exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.py").write_text(SWEEP)
    (tmp_path / "cluster.toml").write_text(CLUSTER)

    def call(*arguments, cluster="cluster.toml"):
        return command("simulate", "sweep.py", "--cluster", cluster, "--seconds", "1", *arguments)

    return call


@pytest.mark.timeout(60)
def test_the_command_tells_how_the_sweep_would_run(tmp_path):
    (tmp_path / "sweep.py").write_text(SWEEP)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    arguments = ["simulate", "sweep.py", "--cluster", "cluster.toml", "--what-if", "+1xT4", "--seconds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "rota", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=55
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "cluster    2 cpu"
    assert any("w32-lr0.001, w32-lr0.0003" in line for line in lines)
    assert any(line.strip().startswith("*") and "single" in line for line in lines)
    rows = [line for line in lines if line.startswith("box:")]
    assert len(rows) == 2
    assert {line.split()[0] for line in lines if line[1:3] == "  " and line[0].isalpha()} >= set("abcd")
    for word in ("makespan", "bound", "otherwise", "what if    +1xT4"):
        assert sum(line.startswith(word) for line in lines) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "cluster.toml",
        "sweep.py",
    ]


@pytest.mark.deep
@pytest.mark.timeout(60)
def test_json_tells_the_same_and_the_same_again(simulate):
    first = simulate("--json", "--what-if", "+1xT4", "--what-if", "+1 node of 1xH100")
    code, out, err = first
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [task["name"] for task in found["tasks"]] == ["w32-lr0.001", "w32-lr0.0003", "w64-lr0.001", "w64-lr0.0003"]
    assert [task["steps"] for task in found["tasks"]] == [10_000, 10_000, 20_000, 20_000]
    for task in found["tasks"]:
        assert sum(one["chosen"] for one in task["options"]) == 1
        assert {one["devices"] for one in task["options"]} == {1, 2}
    same = [[{**one, "chosen": None} for one in task["options"]] for task in found["tasks"][:2]]
    assert same[0] == same[1]
    assert found["makespan_s"] == max(one["end_s"] for one in found["schedule"])
    assert found["bound"] <= found["makespan_s"] * (1 + 1e-6)
    assert found["simple"].keys() == {"max", "min", "random", "optimus"}
    assert all(value >= found["makespan_s"] * (1 - 1e-6) for value in found["simple"].values())
    assert all(one["makespan_s"] <= found["makespan_s"] for one in found["what_if"])
    assert found["what_if"][0]["saved_makespan_s"] > 0
    again = json.loads(simulate("--json")[1])
    options = [[{**one, "chosen": None} for one in task["options"]] for task in (*found["tasks"], *again["tasks"])]
    assert options[:4] == options[4:]


@pytest.mark.timeout(60)
def test_cost_counts_what_devices_are_worth(simulate):
    code, out, _ = simulate("--json", "--objective", "cost")
    assert code == 0
    found = json.loads(out)
    hours = sum((one["end_s"] - one["start_s"]) * len(one["devices"]) for one in found["schedule"]) / 3600
    assert found["value"] == pytest.approx(0.5 * hours)


@pytest.mark.timeout(30)
def test_what_has_no_price_is_not_for_nothing(simulate, tmp_path):
    (tmp_path / "free.toml").write_text(CLUSTER.replace("price = 0.5\n", ""))
    code, out, err = simulate("--objective", "cost", cluster="free.toml")
    assert (code, out) == (2, "")
    assert "the node box has none; add price" in err
    code, _, err = simulate("--objective", "cost", "--what-if", "+4xA100-40GB")
    assert code == 2
    assert "no node with a price for A100-40GB" in err


@pytest.mark.timeout(60)
def test_missed_deadlines_are_told_by_task(simulate, tmp_path):
    (tmp_path / "sweep.py").write_text(
        SWEEP.replace("epochs=2000", "deadline_s=1e-3 if lr == 1e-3 else 1e9, epochs=2000")
    )
    found = json.loads(simulate("--json")[1])
    assert found["late"].keys() == {"w32-lr0.001", "w64-lr0.001"}
    assert found["late_s"] == pytest.approx(sum(found["late"].values()))
    assert "behind the deadlines: w" in simulate()[1]


@pytest.mark.timeout(60)
def test_a_task_that_fits_nowhere_is_told_what_would_do(simulate, tmp_path):
    text = '[[node]]\nkind = "tiny"\ndevices = 2\n'
    text += '[kind.tiny]\nflops = 1e10\nmemory = "100KiB"\nmemory_bandwidth = "1GB/s"\n'
    (tmp_path / "tiny.toml").write_text(text)
    code, out, err = simulate(cluster="tiny.toml")
    assert (code, out) == (2, "")
    assert "task 'w32-lr0.001'" in err
    assert "fits into" in err
    assert "needs" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--what-if", "4 more"), "--what-if '4 more' cannot be read"),
        (("--what-if", "+4xA1000-40GB"), "did you mean A100-40GB"),
        (("--objective", "beauty"), "beauty"),
        (("--seconds", "0"), "0"),
    ],
)
@pytest.mark.timeout(30)
def test_wrong_options_are_refused_before_anything_is_made(simulate, arguments, words):
    code, out, err = simulate(*arguments)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.timeout(30)
def test_a_cluster_file_that_is_not_there_or_wrong(simulate, tmp_path):
    assert "there is no cluster file no.toml" in simulate(cluster="no.toml")[2]
    (tmp_path / "bad.toml").write_text('[[node]]\nkind = "T5"\ndevices = 1\n')
    code, _, err = simulate(cluster="bad.toml")
    assert code == 2
    assert err.startswith("rota: bad.toml: [[node]] number 1: there is no device kind 'T5'; did you mean T4")


@pytest.mark.timeout(60)
def test_a_model_that_cannot_be_made_names_its_task(simulate, tmp_path):
    broken = SWEEP.replace("GPT(vocabulary=32", "GPT(vocabulary='many'")
    (tmp_path / "sweep.py").write_text(broken)
    code, out, err = simulate()
    assert (code, out) == (2, "")
    assert "task 'w32-lr0.001' cannot be predicted" in err
