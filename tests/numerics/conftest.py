"""What tests of models that come and go share: graphs and footprints, which come out the same whenever one looks."""

import pytest

from rota.memory import spilling
from rota.runtime.choose import graph_of
from rota.runtime.footprint import Footprints, likeness

GRAPHS, FOOTPRINTS = {}, {}


def _same(function):
    """What two functions have in common that were made by the same lines from the same values."""
    if not hasattr(function, "__code__"):
        return function
    return function.__code__, function.__defaults__, tuple(one.cell_contents for one in function.__closure__ or ())


def _remembered_graph(parts, batch):
    model, task = parts.model, parts.task
    key = (
        *(_same(task.model), _same(task.loss), task.precision),
        tuple(module.training for module in model.modules()),
        tuple((str(one.device), one.dtype, one.requires_grad) for one in model.parameters()),
        spilling.shape_of(batch),
    )
    try:
        hash(key)
    except TypeError:
        return graph_of(parts, batch)
    if key not in GRAPHS:
        GRAPHS[key] = graph_of(parts, batch)
    return GRAPHS[key]


class Remembering(Footprints):
    """Measures what no test before has measured."""

    def of(self, segment, strides=()):
        key = self._plain, likeness(self._refined, segment), *strides
        if key not in FOOTPRINTS:
            FOOTPRINTS[key] = super().of(segment, strides)
        return FOOTPRINTS[key]


@pytest.fixture
def remembered(monkeypatch):
    """Captures each model once in a process, and measures each segment once: most of the time of a short task."""
    monkeypatch.setattr("rota.memory.spilling.graph_of", _remembered_graph)
    for user in ("rota.memory.arrange", "rota.memory.pooled", "rota.plan.occupancy"):
        monkeypatch.setattr(f"{user}.Footprints", Remembering)
