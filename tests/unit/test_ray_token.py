"""Which token a Ray cluster is shown, and what is said if it is not the right one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rota[ray]'")

from rota.execute.backends import ray_token

PLACE = "first:6379"


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """Meets a cluster that asks for a token or for none; gives the mode in which it was left."""

    def call(*, asks: str | None, has: str | None, mode: str | None = None) -> str | None:
        state = {"mode": mode}
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        if mode is not None:
            monkeypatch.setenv("RAY_AUTH_MODE", mode)
        monkeypatch.setattr(ray_token, "_set_mode", lambda new: state.update(mode=new))
        monkeypatch.setattr(ray_token, "_has_token", lambda: has is not None)
        shown = lambda: has if state["mode"] == "token" else None  # noqa: E731
        monkeypatch.setattr(ray_token, "_is_refused", lambda address: asks is not None and shown() != asks)
        try:
            ray_token.show_what_is_asked_for(PLACE)
        finally:
            call.left = state["mode"]  # type: ignore[attr-defined]
        return state["mode"]

    return call


def test_the_token_is_shown_where_it_is_asked_for_and_only_there(meet: Any) -> None:
    assert meet(asks="a", has="a") == "token"
    assert meet(asks="a", has="a", mode="token") == "token"
    assert meet(asks=None, has="a") is None  # Ray lets one in who shows a token there, and its actors die
    assert meet(asks=None, has=None) is None
    assert meet(asks=None, has=None, mode="disabled") == "disabled"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"asks": "a", "has": "b"}, "has another token than this machine"),
        ({"asks": "a", "has": None}, "there is none here; ~/.ray/auth_token (or RAY_AUTH_TOKEN) must be the same"),
        ({"asks": "a", "has": "a", "mode": "disabled"}, "unset RAY_AUTH_MODE, which is 'disabled'"),
        ({"asks": None, "has": "a", "mode": "token"}, "RAY_AUTH_MODE here is 'token'; unset it"),
    ],
)
def test_what_does_not_match_is_said_and_nothing_is_left_changed(
    meet: Any, refused: Any, case: dict[str, Any], said: str
) -> None:
    sentence = refused(meet, **case)
    assert said in sentence
    assert PLACE in sentence
    assert meet.left == case.get("mode")


def test_a_cluster_of_our_own_has_a_token_that_is_not_left_at_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_token, "_set_mode", lambda mode: os.environ.update(RAY_AUTH_MODE=mode))
    monkeypatch.setattr(ray_token, "_has_token", lambda: False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "to be put back")
        monkeypatch.delenv(name)
    ray_token.make_one_for_this_process()
    first = os.environ["RAY_AUTH_TOKEN"]
    assert len(first) == 64
    assert os.environ["RAY_AUTH_MODE"] == "token"
    ray_token.make_one_for_this_process()
    assert os.environ["RAY_AUTH_TOKEN"] == first
    assert list(tmp_path.iterdir()) == []


def test_what_the_user_says_or_has_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_token.make_one_for_this_process()
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(ray_token, "_has_token", lambda: True)
    ray_token.make_one_for_this_process()
    assert "RAY_AUTH_TOKEN" not in os.environ
