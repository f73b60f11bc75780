"""Whether shares of a batch make up the whole is looked at on the first batch, which changes nothing."""

import json
import subprocess
import sys

import pytest

CASES = r"""
import torch
import torch.nn.functional as F
from collections import UserDict
from torch import nn

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
PADDED = torch.tensor([[0, 1, 2], [1, -100, -100], [2, 2, 1], [0, -100, -100], [1, 0, 2], [2, 1, 0], [0, 1, -100]])
BATCH = UserDict(x=X, y=Y, padded=PADDED)


class Plain(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.calls = 0

    def forward(self, batch):
        self.calls += 1
        return self.layers(batch["x"].to(next(self.parameters()).dtype))


class Mixture(nn.Module):
    "Experts, with the loss that balances them: a product of means, which is no mean of products."

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, batch):
        odds = self.router(batch["x"].to(self.router.weight.dtype)).softmax(-1)
        best, which = odds.max(-1)
        made = torch.stack([one(batch["x"].to(odds.dtype)) for one in self.experts], 1)
        self.balance = 3 * (F.one_hot(which, 3).to(odds.dtype).mean(0) * odds.mean(0)).sum()
        return made[torch.arange(len(which)), which] * best[:, None]


class SingleMixture(Mixture):
    def forward(self, batch):
        torch.zeros(4) @ self.router.weight[0]  # not in doubles
        return super().forward(batch)


class Follows(nn.Module):
    "A buffer that the loss does not see."

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, batch):
        made = self.layer(batch["x"].to(self.layer.weight.dtype))
        with torch.no_grad():
            self.mean.lerp_(made.mean(0), 0.1)
        return made


class Single(Plain):
    "Insists on single precision."

    def forward(self, batch):
        return self.layers(batch["x"].float())


def small(*more):
    return lambda: Plain(nn.Linear(4, 3), *more)


def mean(model, batch):
    return F.cross_entropy(model(batch), batch["y"])


def summed(model, batch):
    made = model(batch)
    right = (made.argmax(-1) == batch["y"]).sum()
    loss = F.cross_entropy(made, batch["y"], reduction="sum")
    return {"loss": loss, "right": right, "none": right * 0, "rate": right / len(made), "top": made.max(), "two": 2.0}


def tokens(model, batch):
    made = model(batch)
    return F.cross_entropy(made[:, None].expand(-1, 3, -1).flatten(0, 1), batch["padded"].flatten())


def balanced(model, batch):
    return mean(model, batch) + 0.001 * model.balance


def contrast(model, batch):
    made = model(batch)
    return F.cross_entropy(made @ made.T, torch.arange(len(made)))


def mixed(model, batch):
    made = model(batch)
    return F.cross_entropy(made[torch.randperm(len(made))], batch["y"])


class Uncopyable(Plain):
    def __deepcopy__(self, memo):
        raise TypeError("there is only one")


OTHERS = "neither: on the first batch"
CASES = {
    "a mean": (small(), mean, ""),
    "a mean of uneven shares in bfloat16": (small(), mean, ""),
    "a sum": (small(), summed, ""),
    "tokens that count": (small(), tokens, OTHERS),
    "tokens that count, with dropout": (small(nn.Dropout(0.5)), tokens, OTHERS),
    "a mean with dropout": (small(nn.Dropout(0.5)), mean, ""),
    "a mixture of experts": (Mixture, balanced, OTHERS),
    "a mixture of experts in its own precision": (SingleMixture, balanced, OTHERS),
    "a mixture of experts without its balance": (Mixture, mean, ""),
    "batch norm": (small(nn.BatchNorm1d(3)), mean, OTHERS),
    "a buffer": (Follows, mean, "the buffer mean is another one"),
    "samples that see each other": (small(), contrast, OTHERS),
    "permutations": (small(), mixed, ""),
    "its own precision": (lambda: Single(nn.Linear(4, 3)), mean, ""),
    "its own precision, tokens that count": (lambda: Single(nn.Linear(4, 3)), tokens, OTHERS),
    "no copy": (lambda: Uncopyable(nn.Linear(4, 3)), mean, ""),
    "no room": (small(), tokens, ""),
}
"""

RANK = (
    CASES
    + r"""
import gc, json, random, sys
from pathlib import Path

import numpy as np
import rota
from rota.errors import TaskError
from rota.runtime import shares
from rota.runtime.executor import Eager
from rota.runtime.gang import Gang
from rota.runtime.training import Training
from rota.strategies import find

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
gang = Gang(rank=rank, size=size, store=store, key=b"k")
gang.meet(timeout_s=60)


def parts_of(name):
    make, loss, _ = CASES[name]
    task = rota.Task(
        name="a", model=make, loss=loss, steps=1, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=lambda: rota.Data(train=[BATCH], batch_size=1), precision="bfloat16" if "bfloat16" in name else "float32",
    )
    return Training(task, device=torch.device("cpu")).parts


def state_of(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    held = [(name, id(one), one._version, one.tolist(), id(one.grad), str(one.grad)) for name, one in tensors]
    drawn = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return repr((held, drawn, getattr(model, "calls", 0), model.training))


found = {}
for name in CASES:
    parts, notices = parts_of(name), []
    for parameter in parts.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state_of(parts.model)
    has_room = shares.has_room_for
    if name == "no room" and rank == 1:
        shares.has_room_for = lambda size_bytes: False
    try:
        made = shares.makeup_of(parts, BATCH, gang=gang, strategy="torch_ddp", notice=notices.append)
        told = {"sums": sorted((made or shares.Makeup()).sums)}
    except TaskError as error:
        told = {"refused": str(error)}
    shares.has_room_for = has_room
    found[name] = told | {"notices": notices, "unchanged": state_of(parts.model) == before}

for kind in ("torch_ddp", "torch_fsdp2"):
    torch.manual_seed(0)
    ours, plainly = parts_of("a sum"), parts_of("a sum")
    executor, alone = find(kind).execute(ours, BATCH, gang=gang, notice=print), Eager(plainly)
    rows = []
    for number in range(2):
        for one in (executor, alone):
            one.zero_grad()
            rows.append(one.backward(BATCH, number=number))
            one.update()
    weights = executor.weights(between_steps=True)
    if rank == 0:
        expected = alone.weights(between_steps=True).model
        far = max(float((weights.model[key] - value).detach().abs().max()) for key, value in expected.items())
        off = max(abs(a[key] - b[key]) for a, b in zip(rows[::2], rows[1::2]) for key in a if key != "top")
        found[kind] = [far, off]
def ignoring(model, batch):
    made = model(batch)
    return F.cross_entropy(made[:, None].expand(-1, 3, -1).flatten(0, 1), batch["padded"].flatten())


def weighted(model, batch):
    found = F.cross_entropy(model(batch), batch["y"], reduction="none")
    return (found * batch["weights"]).sum() / batch["weights"].sum()


def keeping(model, batch):
    model.kept = model(batch)  # it cannot be copied after a step
    return F.cross_entropy(model.kept[:, None].expand(-1, 3, -1).flatten(0, 1), batch["padded"].flatten())


WHOLE = PADDED.clamp(min=0)
ONES, STEEP = torch.ones(7), torch.arange(1.0, 8.0)
CASES |= {
    "padded later": (small(nn.Dropout(0.5)), ignoring, ""),
    "padded later and keeps what it made": (small(), keeping, ""),
    "weighted later": (small(), weighted, ""),
    "a mean throughout": (small(), mean, ""),
}
LATER = {
    "padded later": [{"padded": WHOLE}] * 4 + [{"padded": PADDED}],
    "padded later and keeps what it made": [{"padded": WHOLE}] * 4 + [{"padded": PADDED}],
    "weighted later": [{"weights": ONES}] * 3 + [{"weights": STEEP}],
    "a mean throughout": [{"padded": WHOLE}, {"padded": PADDED}, {"weights": STEEP}],
}
for kind in ("torch_ddp", "torch_fsdp2"):
    for name, changes in LATER.items():
        torch.manual_seed(0)
        parts, notices, told = parts_of(name), [], {"refused": "", "steps": 0}
        batches = [UserDict(x=X, y=Y, padded=WHOLE, weights=ONES) | change for change in changes]
        executor = find(kind).execute(parts, batches[0], gang=gang, notice=notices.append)
        try:
            for number, batch in enumerate(batches):
                executor.zero_grad()
                executor.backward(batch, number=number)
                executor.update()
                told["steps"] += 1
        except TaskError as error:
            told["refused"] = str(error)
        found[f"{kind}, {name}"] = told | {"notices": notices}
        del executor, parts
        gc.collect()  # what is wrapped ends before the processes part
gang.part()
if rank == 0:
    Path(sys.argv[4]).write_text(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    arguments = ["2", str(folder / "store"), str(folder / "found.json")]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), *arguments], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [one.communicate(timeout=100)[1] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert [one.returncode for one in ranks] == [0, 0], "\n".join(errors)
    return json.loads((folder / "found.json").read_text())


made = {}
exec(CASES, made)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", made["CASES"])
def test_a_loss_that_shares_do_not_make_up_is_refused_and_nothing_is_changed(found, name):
    expected, told = made["CASES"][name][2], found[name]
    assert expected in told.get("refused", "")
    assert bool(expected) == ("refused" in told), told
    assert told["unchanged"]


@pytest.mark.timeout(120)
def test_what_is_a_sum_over_samples_is_taken_for_one(found):
    assert found["a sum"]["sums"] == ["loss", "none", "right"]
    assert found["a mean"] == {"sums": [], "notices": [], "unchanged": True}
    (notice,) = found["a sum"]["notices"]
    assert "the metric 'top' is neither a mean nor a sum" in notice


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["torch_ddp", "torch_fsdp2"])
def test_a_sum_trains_as_on_one_device(found, kind):
    far, off = found[kind]
    assert far < 1e-6
    assert off < 1e-5


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a mean with dropout", "each device draws random numbers"),
        ("permutations", "it was not checked whether the loss is a mean over samples (it draws by randperm"),
        ("no copy", "not checked whether the loss is a mean over samples (a copy of the model raised TypeError: there"),
        ("no room", "not checked whether the loss is a mean over samples (there is no room for a copy"),
    ],
)
def test_what_was_not_checked_and_what_is_random_is_told(found, name, words):
    (notice,) = found[name]["notices"]
    assert words in notice


LATER = {
    "padded later": "on batch 5 the loss of all samples is",
    "padded later and keeps what it made": "on batch 5 the loss of all samples is",
    "weighted later": "on batch 4 the loss of all samples is",
    "a mean throughout": "",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["torch_ddp", "torch_fsdp2"])
@pytest.mark.parametrize("name", LATER)
def test_a_loss_that_is_a_mean_on_the_first_batch_only_is_refused_where_it_is_none(found, kind, name):
    told, words = found[f"{kind}, {name}"], LATER[name]
    assert words in told["refused"]
    assert bool(words) == bool(told["refused"])
    assert told["steps"] == {"weighted later": 3, "a mean throughout": 3}.get(name, 4)
    assert sum("compared are also the batches 2, 4, 8, ..." in one for one in told["notices"]) == 1
    assert len(told["notices"]) == len(set(told["notices"]))
