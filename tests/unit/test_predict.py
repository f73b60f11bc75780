"""Predictions for kinds of devices: what is asked, what is kept, and that it is the same every time."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import rota
from rota.cluster.file import NodeLink, Site
from rota.cluster.kinds import KINDS
from rota.errors import FitError
from rota.graph.capture import capture
from rota.profile.estimate import PREDICTED_SPREAD
from rota.profile.predict import Predictor, Subject, counts_across, counts_within, digest_of, predict
from rota.profile.subjects import profiled
from rota.runtime.planned import moments_of
from rota.schedule.problem import Node
from rota.testing.models import GPT

T4 = KINDS["T4"]


def loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


class Renamed(torch.nn.Module):
    """A model under another name."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, rows):
        return self.inner(rows)


@functools.cache
def subject(width=64, depth=2, samples=8, renamed=False):
    with torch.device("meta"):
        model = GPT(vocabulary=64, context=32, width=width, depth=depth, heads=2)
        rows = torch.zeros((samples, 33), dtype=torch.int64)
    graph = capture(Renamed(model) if renamed else model, rows, loss)
    return Subject(graph=graph, digest=digest_of(graph))


def site(*sizes, kind="T4"):
    nodes = [
        Node(name=f"n{i}", kind=kind, devices=tuple(f"n{i}:{k}" for k in range(size))) for i, size in enumerate(sizes)
    ]
    return Site(nodes=tuple(nodes), kinds=KINDS)


def test_the_numbers_of_devices_that_are_looked_at():
    assert counts_within(1) == [1]
    assert counts_within(8) == list(range(1, 9))
    assert counts_within(20) == [*range(1, 9), 12, 16, 20]
    assert counts_across([8]) == []
    assert counts_across([8, 8]) == [16]
    assert counts_across([8, 4]) == [12]
    assert counts_across([8] * 5) == [16, 32, 40]
    assert counts_across([64, 64]) == []


def test_a_digest_knows_shapes_and_not_names():
    assert subject().digest == subject(renamed=True).digest
    others = {subject().digest, subject(width=32).digest, subject(depth=1).digest, subject(samples=4).digest}
    assert len(others) == 4


def test_an_estimate_is_predicted_and_the_same_again():
    first = predict(subject(), T4, 2)
    assert first == predict(subject(), T4, 2)
    assert all((one.kind, one.devices, one.measured, one.spread) == ("T4", 2, False, PREDICTED_SPREAD) for one in first)
    assert all(a.step_s <= b.step_s for a, b in itertools.pairwise(first))
    assert first[0].start_s > 0
    assert not first[0].spans


def test_over_nodes_it_is_not_faster():
    given = replace(subject(), strategy="data")
    (near,), (far,) = predict(given, T4, 2), predict(given, T4, 2, link=NodeLink(bytes_per_s=1e8))
    assert far.spans
    assert far.step_s > near.step_s


def test_accumulated_steps_take_their_batches():
    once, twice = (predict(replace(subject(), accumulate=count), T4, 1)[0] for count in (1, 2))
    assert twice.step_s == pytest.approx(2 * once.step_s)


def test_what_the_user_chose_is_predicted_alone():
    (one,) = predict(replace(subject(), strategy="zero(stage=3)"), T4, 2)
    assert one.label == "zero(stage=3)"
    (one,) = predict(replace(subject(), strategy="torch_ddp"), T4, 2)
    assert one.label == "torch_ddp"


def test_more_devices_are_not_looked_at_where_they_cannot_matter():
    few = Predictor().estimates(subject(), site(2), steps=1)
    assert {one.devices for one in few} == {1}
    many = Predictor().estimates(subject(), site(2, 2), steps=1e9)
    assert {one.devices for one in many} >= {1, 2}
    assert {one.spans for one in many if one.devices > 2} <= {True}


def test_a_fixed_number_of_devices():
    found = Predictor().estimates(replace(subject(), devices=2), site(1, 1, 2))
    assert {one.devices for one in found} == {2}


def test_what_fits_nowhere_says_what_would_do(refused):
    tiny = replace(T4, name="tiny", memory_bytes=2**17)
    with pytest.raises(FitError):
        predict(subject(), tiny, 1)
    small = Site(nodes=site(1, kind="tiny").nodes, kinds={"tiny": tiny})
    sentence = refused(Predictor().estimates, subject(), small)
    assert "fits into" in sentence
    assert "needs" in sentence
    assert "needs 9 devices" in refused(Predictor().estimates, replace(subject(), devices=9), site(2, 2))


@pytest.mark.parametrize(
    ("make", "bytes_per_byte"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
        (lambda p: torch.optim.AdamW(p), 2.0),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3.0),
        (lambda p: torch.optim.Adagrad(p), 1.0),
    ],
)
def test_what_an_optimizer_keeps(make, bytes_per_byte):
    assert moments_of(make([torch.nn.Parameter(torch.zeros(2))])) == bytes_per_byte


def test_tasks_that_cost_the_same_are_captured_once():
    def task(lr, width, seed=0):
        return rota.Task(
            name=f"w{width}-lr{lr:g}-{seed}",
            model=lambda: GPT(vocabulary=64, context=32, width=width, depth=1, heads=2),
            data=lambda: rota.Data(train=torch.zeros((40, 33), dtype=torch.int64), batch_size=8),
            loss=loss,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
            epochs=3,
            seed=seed,
        )

    told = []
    tasks = [task(0.1, 32), task(0.2, 64), task(0.3, 32), task(0.3, 32, seed=1)]
    found = profiled(rota.Sweep(tasks=tuple(tasks)), notice=told.append)
    assert len(told) == 2
    assert [one.task.name for one in found] == [one.name for one in tasks]
    assert [one.steps for one in found] == [15] * 4
    assert found[0].subject is found[2].subject is found[3].subject
    assert found[0].subject != found[1].subject
    assert found[0].subject.moments == 0.0
