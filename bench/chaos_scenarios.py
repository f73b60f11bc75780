"""What system calls fail under: small runs of each kind that writes in a way of its own, and how each is begun."""

from __future__ import annotations

from dataclasses import dataclass

SWEEPS = """
import dataclasses, os, random, time
import torch, rota
import torch.nn.functional as F
from rota.balance.decide import Migrate
from rota.testing.models import GPT

ROWS = torch.randint(0, 32, (64, 17), generator=torch.Generator().manual_seed(1))


class Rows(torch.utils.data.Dataset):
    '''Rows that can be read so many times in one process, and no more.'''

    def __init__(self):
        self.left = int(os.environ.get("ROTA_CHAOS_ROWS", "1000000"))
        self.wait_s = float(os.environ.get("ROTA_CHAOS_ROW_S", "0"))

    def __len__(self):
        return 56

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("this row is not to be read yet")
        return ROWS[index]


def restless(standing, seen, facts):
    '''Moves work between devices, again and again.'''
    draw = random.Random(seen.step)
    if standing.under_way is None and seen.step % 4 == 1:
        raw = [draw.uniform(0.2, 1) for _ in range(facts.ranks)]
        shares = tuple(one / sum(raw) for one in raw)
        return dataclasses.replace(standing, under_way=shares), Migrate(shares=shares, why="chaos")
    return standing, None


def task(name, strategy, devices, lr, *, width=32, depth=1, steps=6, dropout=0.1, balance="off", precision="float32"):
    return rota.Task(
        name=name,
        model=lambda: GPT(vocabulary=32, context=16, width=width, depth=depth, heads=4, dropout=dropout),
        data=lambda: rota.Data(train=Rows(), valid=ROWS[56:], batch_size=4),
        loss=lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        steps=steps, valid_every=3, strategy=strategy, devices=devices, checkpoint_every=2, balance=balance,
        clip_norm=1.0, precision=precision,
    )


def sweep(*tasks):
    return rota.Sweep(tasks=list(tasks))


def exact(name, strategy, devices, **other):
    '''A task of which sums may be in any order.'''
    return sweep(task(name, strategy, devices, 1e-3, dropout=0.0, precision="float64", **other))


plain = sweep(task("one", "single", 1, 1e-3), task("two", "single", 1, 3e-3))
gang = sweep(task("gang", "tensor", 2, 1e-3))
replicas = sweep(task("replicas", "data", 2, 1e-3))
spilled = sweep(task("spilled", "spill", 1, 1e-3, width=192, depth=3))
shared = sweep(task("shared", "data(2) * spill", 2, 1e-3, width=192, depth=3))
pool = sweep(*[task(name, "pool", 1, lr, width=192, depth=3, steps=4) for name, lr in (("one", 1e-3), ("two", 3e-3))])
to_spill = exact("task", "auto", 1, width=64)
from_spill = exact("task", "auto", 2, width=64)
moved = exact("moved", "tensor", 2, depth=2, steps=16, balance=restless)
"""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run."""

    name: str
    """Also of its sweep."""
    options: tuple[str, ...]
    """Of `rota run`."""
    rows: int | None = None
    """So many can be read until the first command ends in failure;"""
    then: tuple[str, ...] = ()
    """`rota resume` with these options is then to go on."""
    row_s: float = 0.0
    """How long reading one takes."""
    equal: bool = True
    """Bit for bit; otherwise up to the order of sums in doubles."""


def _where(devices: int, memory: str) -> tuple[str, ...]:
    return "--devices", str(devices), "--memory", memory


SCENARIOS = (
    Scenario(name="plain", options=_where(2, "1GiB")),
    Scenario(name="gang", options=_where(2, "1GiB")),
    Scenario(name="spilled", options=_where(1, "58MiB")),
    Scenario(
        name="to_spill",
        options=(*_where(2, "1GiB"), "--strategy", "single"),
        rows=18,
        then=("--strategy", "spill"),
        equal=False,
    ),
    Scenario(name="replicas", options=_where(2, "1GiB")),
    Scenario(
        name="from_spill",
        options=(*_where(2, "1GiB"), "--strategy", "data(2) * spill"),
        rows=18,
        then=("--strategy", "tensor"),
        equal=False,
    ),
    Scenario(name="shared", options=_where(2, "70MiB")),
    Scenario(name="moved", options=_where(2, "1GiB"), row_s=0.01, equal=False),
    Scenario(name="pool", options=_where(2, "60MiB")),
)
