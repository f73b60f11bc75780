"""torch.compile is tried on a segment while it runs, kept where it is faster, and left where it is not or fails."""

import pytest
import torch

from rota.runtime import trial
from rota.runtime.trial import Trial


class Clock:
    """Advanced by what is called."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def module_of(function):
    return torch.fx.symbolic_trace(function)


def run(one, clock, seconds, times):
    for _ in range(times):
        with one.timing(ends=False):
            clock.now_s += seconds(one)
        with one.timing(ends=True):
            clock.now_s += seconds(one)


@pytest.mark.parametrize(("compiled_s", "kept"), [(0.5, True), (2.0, False)])
def test_the_faster_one_is_kept(monkeypatch, compiled_s, kept):
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    clock = Clock()
    one = Trial(module_of(lambda x: x + 1), clock=clock)
    plain = one.choice

    def seconds(one):
        return 1.0 if one.choice == plain else compiled_s

    run(one, clock, seconds, trial._WARM_UP + trial._RUNS)
    assert one.choice != plain
    assert one.kept is None
    run(one, clock, seconds, trial._WARM_UP + trial._RUNS)
    assert one.kept is kept
    assert (one.choice != plain) is kept
    assert torch.equal(one.choice(torch.ones(2)), torch.full((2,), 2.0))


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch):
    def broken(module, **options):
        def call(*arguments):
            raise RuntimeError("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    clock = Clock()
    one = Trial(module_of(lambda x: x * 3), clock=clock)
    run(one, clock, lambda one: 1.0, trial._WARM_UP + trial._RUNS)
    assert torch.equal(one.choice(torch.ones(2)), torch.full((2,), 3.0))
    assert one.kept is False
    assert one.choice == one._module.forward
