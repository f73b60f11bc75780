"""What tasks import is not their memory, whenever they do; what never ends is named and ended."""

import json

import rota

SWEEP = """
import re, sys, threading
import torch
import rota
import helper


def hold_the_interpreter():
    re.match("(a+)+$", "a" * 60 + "b")


def at_step(number, name):
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) == number:
            __import__(name)
        return model(batch).square().mean()

    return loss


def in_a_thread():
    thread = threading.Thread(target=__import__, args=("large_2",))
    thread.start()
    thread.join()
    assert "large_2" in sys.modules
    return torch.nn.Linear(4, 1)


def imports(name):
    __import__(name)
    return torch.nn.Linear(4, 1)


def good(**changes):
    fields = dict(
        model=lambda: torch.nn.Linear(4, 1),
        data=lambda: rota.Data(train=torch.ones(8, 4), valid=torch.ones(8, 4), batch_size=4),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        steps=6)
    return rota.Task(**(fields | changes))


sweep = rota.Sweep(tasks=[
    good(name="in-the-factory", model=lambda: imports("large_0")),
    good(name="at-the-first-batch", loss=at_step(1, "large_1")),
    good(name="in-a-thread", model=in_a_thread),
    good(name="in-the-midst", loss=at_step(4, "large_3")),
    good(name="too-much", model=lambda: (imports("large_4"), bytearray(2**27))[0]),
    good(name="module-hangs", model=lambda: imports("endless"), setup_timeout_s=2),
    good(name="holds-the-interpreter", model=hold_the_interpreter, setup_timeout_s=2),
    good(name="unpickling-hangs", model=helper.Late(), setup_timeout_s=2),
    good(name="good"),
])
"""
HELPER = """
import re
import torch


class Late:
    def __call__(self):
        return torch.nn.Linear(4, 1)

    def __setstate__(self, state):
        re.match("(a+)+$", "a" * 60 + "b")

    def __getstate__(self):
        return {"anything": 1}
"""


def test_imports_are_nobodys_memory_and_what_never_ends_is_named(cli, sweep_file, tmp_path):
    file = sweep_file(text=SWEEP)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "endless.py").write_text("while True: pass\n")
    for number in range(5):
        (tmp_path / f"large_{number}.py").write_text("KEPT = b'x' * 2**27\n")
    done = cli.run("run", file, "--out", "run", "--memory", "64MiB", "--devices", "2", "--no-profile")
    assert done.returncode == 1, done.stderr
    ended = {task.name: task for task in rota.open_run(tmp_path / "run").tasks}
    for name in ("in-the-factory", "at-the-first-batch", "in-a-thread", "in-the-midst", "good"):
        assert ended[name].state == "finished", ended[name]
        told = "the code that it loads takes 12" in "".join(line for line in done.stderr.splitlines() if name in line)
        assert told == (name != "good"), done.stderr
    assert "the model factory ran out of memory" in ended["too-much"].reason
    assert ended["module-hangs"].reason == "the model factory did not end within 2 s"
    assert ended["holds-the-interpreter"].reason == "the model factory did not end within 2 s"
    assert ended["unpickling-hangs"].reason == "importing what it needs did not end within 2 s"
    assert json.loads(cli.run("status", "run", "--json").stdout)["counts"] == {"finished": 5, "failed": 4}
