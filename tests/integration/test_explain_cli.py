"""`rota explain` on the quickstart, and what it says to wrong input."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = str(Path(__file__).parents[2] / "examples" / "quickstart.py")
TASK = "gpt-d1-lr0.001"


@pytest.fixture
def explain(command, monkeypatch, tmp_path):
    """Calls the command in this process, in an empty folder; gives its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: command("explain", *arguments)


def test_the_command_explains_the_quickstart_without_leaving_a_file(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rota", "explain", QUICKSTART, "--task", TASK, "--devices", "4", "--strategy", "data"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"task  {TASK}, strategy data", "plan  4 devices, one batch of 16 samples"]
    assert any(line.startswith("blocks.*") and "all_reduce" in line for line in lines)
    rows = [line for line in lines if line.startswith("device ") and set(line[9:]) <= set("FB-.")]
    assert len(rows) == 4
    assert all("F" in row and "B" in row for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_json_and_trace(explain, tmp_path):
    arguments = (QUICKSTART, "--task", TASK, "--devices", "2", "--microbatches", "2")
    code, out, err = explain(*arguments, "--json", "--trace", "step.json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["task"], found["strategy"], found["trace"]) == (TASK, "data", "step.json")
    assert found["microbatch_samples"] == [8, 8]
    assert len(found["loads"]) == found["devices"] == 2
    assert found["step_s"] > 0
    trace = json.loads((tmp_path / "step.json").read_text())
    assert {event["tid"] for event in trace["traceEvents"]} == {0, 1}
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


def test_where_the_trace_is_written_is_said(explain):
    code, out, _ = explain(QUICKSTART, "--task", TASK, "--strategy", "single", "--trace", "step.json")
    assert code == 0
    assert "trace  step.json" in out


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("missing.py",), 2, "there is no file missing.py"),
        ((QUICKSTART,), 2, "the sweep has several tasks; say which with --task: gpt-d4-lr0.001, gpt-d2-lr0.001, "),
        ((QUICKSTART, "--task", "gpt"), 2, "the sweep has no task 'gpt'; it has gpt-d4-lr0.001, "),
        (
            (QUICKSTART, "--task", TASK, "--strategy", "magic"),
            2,
            "there is no strategy 'magic'; choose one of auto, ",
        ),
        ((QUICKSTART, "--task", TASK, "--devices", "17"), 2, "a batch of 16 samples cannot be shared by 17 devices"),
        ((QUICKSTART, "--task", TASK, "--devices", "0"), 2, "at least 1"),
        ((QUICKSTART, "--task", TASK, "--devices", "two"), 2, "'two' is not a valid integer"),
        ((QUICKSTART, "--task", TASK, "--microbatches", "17"), 2, "16 samples cannot be cut into 17 micro-batches"),
        ((QUICKSTART, "--task", TASK, "--memory", "lots"), 2, "'lots' is not a size"),
        ((QUICKSTART, "--task", TASK, "--memory", "1MiB"), 1, "device 0 needs "),
        ((QUICKSTART, "--task", TASK, "--trace", "no/step.json"), 2, "there is no folder no to write the trace to"),
        (("branching.py",), 1, "the model cannot be captured: "),
        (("failing.py",), 1, "the model factory raised ValueError: no such width (failing.py, line "),
    ],
)
def test_wrong_input_is_one_sentence(explain, tmp_path, arguments, code, sentence):
    (tmp_path / "branching.py").write_text(SWEEP.format(forward="return y if y.sum() > 0 else -y", init="pass"))
    (tmp_path / "failing.py").write_text(SWEEP.format(forward="return y", init="raise ValueError('no such width')"))
    found, out, err = explain(*arguments)
    assert found == code
    assert out == ""
    assert sentence in err
    assert "Traceback" not in err
    assert err.count("\n") == 1 or "is not a valid integer" in err  # click shows its usage above


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_a_task_is_captured_in_its_precision(explain, tmp_path, precision):
    text = SWEEP.format(forward="return y", init="pass").replace("steps=1", f"steps=1, precision={precision!r}")
    (tmp_path / "precise.py").write_text(text)
    code, out, err = explain("precise.py", "--devices", "2", "--json")
    assert (code, err) == (0, "")
    gradient = next(one for one in json.loads(out)["communications"] if one["pattern"] == "fc.weight")
    assert gradient["received_bytes"] == 2 * 16 * (8 if precision == "float64" else 4)


POOL = """
import torch
import torch.nn.functional as F
import rota


def task(name, depth, steps):
    def model():
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(depth)))

    return rota.Task(
        name=name,
        model=model,
        data=lambda: rota.Data(train=torch.randn(8, 64), batch_size=4),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        steps=steps,
    )


sweep = rota.Sweep(tasks=[task("long", 4, 30), task("short", 2, 10)])
"""


@pytest.fixture
def pool_file(tmp_path, monkeypatch):
    monkeypatch.setenv("ROTA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pool.py").write_text(POOL)
    return "pool.py"


def test_a_pool_is_told_with_all_its_tasks_the_bound_and_when_it_ends(explain, pool_file):
    options = (pool_file, "--strategy", "pool", "--memory", "64MiB", "--devices", "2")
    code, out, err = explain(*options)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("pool    2 tasks on 2 devices of 64 MiB: units that run, come and leave have 40 MiB")
    assert [line.split()[0] for line in lines[1:3]] == ["bound", "ends"]
    assert [line.split()[0] for line in lines[4:7]] == ["task", "long", "short"]
    told = json.loads(explain(*options, "--json")[1])
    assert [task["name"] for task in told["tasks"]] == ["long", "short"]
    totals = [task["steps"] * sum(unit["seconds"] for unit in task["units"]) for task in told["tasks"]]
    assert told["bound_s"] == pytest.approx(max(sum(totals) / 2, max(totals)))
    assert told["makespan_s"] >= told["bound_s"] * 0.999
    for task in told["tasks"]:
        assert all(unit["seconds"] > 0 and unit["size_bytes"] >= unit["comes_bytes"] > 0 for unit in task["units"])
        assert task["read_bytes"] == sum(unit["comes_bytes"] for unit in task["units"])


def test_one_task_of_a_pool_is_told_with_its_units(explain, pool_file):
    code, out, err = explain(pool_file, "--strategy", "pool", "--memory", "64MiB", "--task", "short")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "1 task on 1 device" in lines[0]
    units = lines[lines.index("") + 4 :]
    assert units[0].split() == ["unit", "stages", "takes", "needs", "comes", "leaves"]
    assert "forward pass" in units[1]
    assert "backward pass" in units[-1]
    assert len(units) == 1 + int(lines[5].split()[2])


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        ((), 2, "a pool depends on the memory of its devices; say how much that is, such as --memory 1GiB"),
        (("--memory", "64MiB", "--devices", "0"), 2, "at least 1 device"),
        (("--memory", "1KiB"), 2, "1 KiB of memory is too little for any model: 24 MiB are left to allocators"),
        (
            ("--memory", "24.01MiB"),
            1,
            r"the task needs a device with at least \d+(\.\d+)? MiB, and this one has 24 MiB",
        ),
    ],
)
def test_what_a_pool_lacks_is_one_sentence(explain, pool_file, options, code, sentence):
    found, out, err = explain(pool_file, "--strategy", "pool", "--task", "long", *options)
    assert (found, out) == (code, "")
    assert re.search(sentence, err), err
    assert err.count("\n") == 1


SWEEP = """
import torch
import rota


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        {init}

    def forward(self, x):
        y = self.fc(x)
        {forward}


task = rota.Task(
    name="a",
    model=Model,
    data=lambda: rota.Data(train=torch.randn(8, 4), batch_size=4),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    steps=1,
)
sweep = rota.Sweep(tasks=[task])
"""
