"""Models that share devices shard by shard train as they would alone, and one that fails leaves the others in peace."""

import copy

import pytest
import torch

from rota.graph.capture import capture
from rota.memory.pool_run import Member, PoolRun
from rota.memory.pooled import Pooled
from rota.memory.sharp import at_random, longest_remaining
from rota.memory.slab import Budget
from rota.memory.steps import Training
from rota.memory.store import Store
from rota.memory.tiers import Tiers
from rota.testing.models import GPT, ResNet
from tests.numerics.test_spilled import classes, images_of, next_token, plainly, rows_of


def gpt(depth):
    return GPT(vocabulary=32, context=16, width=16, depth=depth, heads=2)


KINDS = {
    "small": (lambda: gpt(1), rows_of, next_token, 9),
    "large": (lambda: gpt(4), rows_of, next_token, 5),
    "images": (lambda: ResNet(width=4, depth=1), images_of, classes, 6),
    "other": (lambda: gpt(2), rows_of, next_token, 7),
}


class Made:
    """A model, ready for a pool."""

    def __init__(self, name, model, batches, loss, *, accumulate, clip_norm, folder, budget_bytes, fails_at=None):
        self.losses = []
        self.tiers = Tiers(Store(folder / name), Budget(10**9))
        parameters = dict(model.named_parameters())
        self.pooled = Pooled(
            capture(model, batches[0], loss),
            parameters,
            dict(model.named_buffers()),
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            training=Training(batches=accumulate, clipped=clip_norm is not None),
            tiers=self.tiers,
            budget_bytes=budget_bytes,
            clip_norm=clip_norm,
        )
        self.pooled.holdings.settle()
        queue = iter(batches)

        def following():
            if fails_at is not None and len(self.losses) >= fails_at:
                raise RuntimeError("no more data")
            return next(queue)

        self.member = Member(
            name=name,
            model=self.pooled,
            batches=following,
            steps=len(batches) // accumulate,
            accumulate=accumulate,
            stepped=self._stepped,
        )

    def _stepped(self, step, metrics):
        self.losses += [one["loss"] for one in metrics]
        return True

    def bring_back(self):
        self.tiers.empty()
        for item, held in self.tiers.held.items():
            if held.shelf is not None and "gradients" not in item:
                self.tiers.begin_load(item)
                self.tiers.finish_load(item)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(("accumulate", "clip_norm"), [(1, None), (2, 0.5)])
def test_each_model_is_trained_as_it_would_be_alone(tmp_path, devices, accumulate, clip_norm):
    expected, made = {}, {}
    budget_bytes = 400_000
    for name, (make, batches_of, loss, steps) in KINDS.items():
        torch.manual_seed(1)
        plain = make()
        moving = copy.deepcopy(plain)
        batches = batches_of(steps * accumulate)
        settings = {"accumulate": accumulate, "clip_norm": clip_norm}
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        expected[name] = (plainly(plain, optimizer, batches, loss, **settings), plain, moving)
        made[name] = Made(name, moving, batches, loss, **settings, folder=tmp_path, budget_bytes=budget_bytes)
    run = PoolRun(
        [one.member for one in made.values()],
        budgets_bytes=[budget_bytes] * devices,
        pick=longest_remaining if devices < 3 else at_random(1),
    )
    result = run.run()
    assert not result.failed
    for name, (losses, plain, moving) in expected.items():
        assert made[name].losses == losses, name
        made[name].bring_back()
        for key, value in plain.state_dict().items():
            assert torch.equal(moving.state_dict()[key], value), (name, key)
        made[name].tiers.close()
    for budget in run.budgets:
        assert budget.peak_bytes <= budget_bytes
        assert budget.used_bytes == 0
    if devices == 3:  # whoever is free runs what is chosen at random
        where = {name: {device for device, one, *_ in result.ran if one == name} for name in KINDS}
        assert max(map(len, where.values())) > 1, "a model's next unit may run on another device"


def test_one_that_fails_leaves_the_others_in_peace(tmp_path):
    made = {}
    for name, (make, batches_of, loss, steps) in KINDS.items():
        torch.manual_seed(1)
        made[name] = Made(
            name,
            make(),
            batches_of(steps),
            loss,
            accumulate=1,
            clip_norm=None,
            folder=tmp_path,
            budget_bytes=400_000,
            fails_at=2 if name == "large" else None,
        )
    run = PoolRun([one.member for one in made.values()], budgets_bytes=[400_000] * 2)
    result = run.run()
    assert list(result.failed) == ["large"]
    assert "no more data" in str(result.failed["large"])
    for name, one in made.items():
        assert len(one.losses) == (2 if name == "large" else KINDS[name][3])
        one.tiers.close()
    assert all(budget.used_bytes == 0 for budget in run.budgets)
