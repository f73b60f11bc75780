"""Tasks on several devices: what they train is what plain PyTorch trains, whoever dies, and however they go on."""

import json
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

import rota
from rota.cli.sweep_file import load_source
from rota.testing import plain

SWEEP = """
import time
from collections import UserDict
import torch
import torch.nn.functional as F
import rota
from rota import strategies
from rota.testing.models import GPT

ROWS = torch.randint(0, 32, (43, 17), generator=torch.Generator().manual_seed(1))


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 38

    def __getitem__(self, index):
        time.sleep(0.002)
        return ROWS[index]


def collate(rows):
    return UserDict(rows=torch.stack(list(rows)))


def loss(model, batch):
    assert type(batch) is UserDict
    rows = batch["rows"]
    logits = model(rows[:, :-1])
    return {"loss": F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()), "scale": 2.5, "peak": logits.mean()}


def groups(model):
    model.tokens.weight.requires_grad_(FROZEN)
    big = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    small = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return [{"params": big, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0, "lr": 2e-3}]


FROZEN = True
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(groups(model), lr=1e-2, momentum=0.9),
    "rmsprop": lambda model: torch.optim.RMSprop(groups(model), lr=1e-3),
}


@rota.strategy
def halves(graph, devices):
    plan = rota.Plan(graph, devices=devices, microbatches=2)
    plan.assign(graph.ops[: len(graph.ops) // 2], 0)
    plan.assign(graph.ops[len(graph.ops) // 2 :], 1)
    return plan


def task(strategy, optimizer):
    return rota.Task(
        name=str(getattr(strategy, "__name__", strategy)).split("(")[0] + "-" + optimizer,
        model=lambda: GPT(vocabulary=32, context=16, width=32, depth=2, heads=2, dropout=0.0),
        data=lambda: rota.Data(train=TRAIN, valid=ROWS[38:], batch_size=8, collate=collate),
        loss=loss,
        optimizer=OPTIMIZERS[optimizer],
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9),
        steps=STEPS, valid_every=4, clip_norm=0.5, accumulate=2, precision="float64", strategy=strategy,
        checkpoint_every=SAVE_EVERY,
    )


STEPS, SAVE_EVERY, TRAIN = 9, None, ROWS[:38]
CHOSEN = [("data", "adamw"), ("tensor", "sgd"), (strategies.pipeline(2, microbatches=4), "rmsprop"), ("zero", "adamw"),
          (halves, "sgd"), ("torch_fsdp2", "adamw"), ("coshard(2)", "adamw")]
sweep = rota.Sweep(tasks=[task(*one) for one in CHOSEN])
"""


def plainly(file):
    return {task.name: plain.train(task) for task in load_source(str(file)).sweep}


def assert_near(path, expected, *, within=1e-10):
    result = rota.open_run(path)
    assert {task.state for task in result.tasks} == {"finished"}, [task.reason for task in result.tasks]
    for task in result.tasks:
        weights = expected[task.name].model.state_dict()
        found = load_file(task.model_path)
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=within, atol=within, msg=f"{task.name}: {name}")
        for ours, theirs in zip(result.history(task), expected[task.name].history, strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                assert abs(ours[key] - value) < within * max(1.0, abs(value)), (task.name, key, ours, theirs)


@pytest.mark.timeout(200)
def test_every_strategy_trains_what_plain_pytorch_trains(cli, sweep_file, tmp_path):
    file = sweep_file(text=SWEEP)
    done = cli.run("run", file, "--devices", "2", "--out", tmp_path / "run", "--json", timeout=180)
    assert done.returncode == 0, done.stderr + done.stdout[-3000:]
    assert_near(tmp_path / "run", plainly(file))


def one_task(text, strategy, **changes):
    text = text.replace(
        'name=str(getattr(strategy, "__name__", strategy)).split("(")[0] + "-" + optimizer', 'name="one"'
    )
    if changes:
        # To be met while it trains it takes its time, and not the processor's.
        numbers = f"TRAIN = {changes['steps']}, {changes['save_every']}, Slow()"
        text = text.replace("TRAIN = 9, None, ROWS[:38]", numbers)
    return text[: text.index("CHOSEN =")] + f"CHOSEN = [({strategy!r}, 'adamw')]\n" + text[text.index("sweep = ") :]


def wait_until(condition, process, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def steps_of(path):
    try:
        return max((task.step for task in rota.open_run(path).record.tasks.values()), default=0)
    except rota.RotaError:
        return 0


@pytest.mark.timeout(200)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.deep), 1])
def test_a_killed_rank_ends_its_peers_and_the_task_goes_on_from_its_checkpoint(cli, sweep_file, tmp_path, victim):
    file = sweep_file(text=one_task(SWEEP, "data", steps=60, save_every=5))
    expected = plainly(file)
    process = cli.start("run", file, "--devices", "2", "--out", tmp_path / "run")
    wait_until(lambda: steps_of(tmp_path / "run") > 8, process)
    workers = sorted(cli.workers(process), key=lambda one: one.pid)
    os.kill(workers[victim].pid, signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err + out
    (task,) = rota.open_run(tmp_path / "run").record.tasks.values()
    assert task.attempt == 2
    assert_near(tmp_path / "run", expected)


@pytest.mark.timeout(200)
def test_a_task_is_resumed_under_another_strategy_and_on_another_number_of_devices(cli, sweep_file, tmp_path):
    file = sweep_file(text=one_task(SWEEP, "zero", steps=60, save_every=1000))
    process = cli.start("run", file, "--devices", "2", "--out", tmp_path / "run")
    wait_until(lambda: steps_of(tmp_path / "run") > 5, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    at = steps_of(tmp_path / "run")
    assert 5 < at < 60
    changed = one_task(SWEEP, "tensor", steps=60, save_every=1000)
    file.write_text(changed)
    done = cli.run("resume", tmp_path / "run", "--devices", "2", "--allow-changes")
    assert done.returncode == 0, done.stderr + done.stdout
    assert_near(tmp_path / "run", plainly(file), within=1e-7)


BROKEN = """
_loss = loss

def loss(model, rows):
    import os, torch.distributed as dist
    if dist.is_initialized() and dist.get_rank() == 1 and model.training:
        raise ValueError("only here")
    return _loss(model, rows)
"""


@pytest.mark.timeout(100)
def test_an_error_of_one_rank_is_the_message_of_the_task(cli, sweep_file, tmp_path):
    text = one_task(SWEEP, "torch_ddp")
    file = sweep_file(text=text.replace("def groups(model)", BROKEN + "\ndef groups(model)"))
    process = cli.start("run", file, "--devices", "2", "--out", tmp_path / "run", "--json")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 1, err
    (task,) = json.loads(out)["tasks"]
    assert task["state"] == "failed"
    assert "ValueError: only here" in task["reason"]


@pytest.mark.timeout(100)
def test_a_strategy_that_does_not_fit_is_refused_before_anything_runs(command, sweep_file, tmp_path):
    file = sweep_file(text=one_task(SWEEP, "data"))
    code, out, err = command("run", file, "--devices", "2", "--strategy", "recycled", "--out", tmp_path / "run")
    assert code == 2, out
    assert "no passes that repeat" in err
    assert not (tmp_path / "run").exists()


AUTO = """
class Stubborn(torch.nn.Module):
    \"\"\"Asks for a number in the middle, which no graph has.\"\"\"

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x):
        x = self.drop(self.layer(x))
        return x * 2 if x.sum().item() > 0 else x


def of(name, model, precision="float32"):
    return rota.Task(
        name=name, model=model, data=lambda: rota.Data(train=torch.rand(24, 16), valid=torch.rand(6, 16), batch_size=8),
        loss=lambda model, rows: (model(rows) - rows).square().mean(), steps=6, valid_every=3, precision=precision,
        optimizer=lambda model: torch.optim.Adam(model.parameters()), accumulate=2,
    )


sweep = rota.Sweep(tasks=[of(NAME, MODEL)])
"""


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    "model", ["Stubborn", "lambda: torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout())"]
)
def test_what_auto_does_not_cut_trains_bit_for_bit_as_alone(cli, sweep_file, tmp_path, model):
    head = "import torch, rota\ntorch.manual_seed(0)\n"
    file = sweep_file(text=head + AUTO.replace("of(NAME, MODEL)", f"of('one', {model})"))
    done = cli.run("run", file, "--devices", "2", "--no-profile", "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    (task,) = json.loads(done.stdout)["tasks"]
    assert any(notice.startswith("auto: ") for notice in task["notices"])
    expected = plainly(file)["one"].model.state_dict()
    found = load_file(task["model"])
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.timeout(300)
def test_on_gpus_strategies_train_what_plain_pytorch_trains(cli, sweep_file, tmp_path):
    file = sweep_file(text=one_task(SWEEP, "data"))
    done = cli.run("run", file, "--devices", "2", "--kind", "cuda", "--out", tmp_path / "run", timeout=280)
    assert done.returncode == 0, done.stderr
    assert_near(tmp_path / "run", plainly(file), within=1e-8)
