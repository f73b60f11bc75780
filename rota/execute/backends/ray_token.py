"""Ray's token: whether a cluster asks for one, whether this process has it, and one for a cluster that rota starts.

Ray itself does not say: one who names a cluster by its address shows no token, and is told after 20 s that there is no
cluster; one who shows a token where none is asked for is let in, and its actors die. `ray start` asks for a token as
soon as there is one in the user's home, which any `ray.init()` on that machine may have left.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import ray as untyped_ray

from rota.errors import InputError

_ray: Any = untyped_ray._raylet
_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_ANSWER_S = 5
_WHERE = "~/.ray/auth_token (or RAY_AUTH_TOKEN) must be the same on all machines"


def show_what_is_asked_for(address: str) -> None:
    """Have this process show its token to the cluster at an address if that asks for one; InputError if it cannot."""
    said = os.environ.get(_MODE)
    _set_mode("disabled")
    try:
        asked = _is_refused(address)
    finally:
        _set_mode(said)
    by_token = (said or "").lower() == "token"
    if not asked:
        if asked is False and by_token:
            raise InputError(
                f"rota.ray: the Ray cluster at {address} asks for no token, but {_MODE} here is 'token'; unset it, or "
                f"start Ray with it on all machines"
            )
        return
    if said is not None and not by_token:
        raise InputError(f"rota.ray: the Ray cluster at {address} asks for a token; unset {_MODE}, which is {said!r}")
    if not _has_token():
        raise InputError(
            f"rota.ray: the Ray cluster at {address} asks for a token, and there is none here; {_WHERE}, as "
            f"`ray get-auth-token` prints it on the machine that started the cluster"
        )
    _set_mode("token")
    if _is_refused(address):
        _set_mode(said)
        raise InputError(f"rota.ray: the Ray cluster at {address} has another token than this machine; {_WHERE}")


def make_one_for_this_process() -> None:
    """For a cluster that rota starts, and that ends with it.

    Ray would leave one in the user's home, and from then on each `ray start` there would ask all machines for it.
    """
    if _MODE not in os.environ and not _has_token():
        os.environ[_TOKEN] = secrets.token_hex(32)
        _set_mode("token")
        loader = _loader()
        if loader is not None:
            loader.reset_cache()


def _is_refused(address: str) -> bool | None:
    """Whether the cluster does not let this process in as it is; None if that cannot be known.

    Asked with the identity of another cluster, Ray answers at once, either way.
    """
    if _loader() is None:
        return None
    try:
        client = _ray.GcsClient(address=address, cluster_id="00" * 28)
        client.internal_kv_keys(b"rota", namespace=None, timeout=_ANSWER_S)
    except Exception as error:  # what else may be wrong, connecting tells
        told = str(error)
        return True if "InvalidAuthToken" in told else False if "WrongClusterID" in told else None
    return False


def _set_mode(mode: str | None) -> None:
    """For this process, which has read the mode already, and those that it starts."""
    if mode is None:
        os.environ.pop(_MODE, None)
    else:
        os.environ[_MODE] = mode
    if _loader() is not None:
        _ray.Config.initialize("")


def _has_token() -> bool:
    loader = _loader()
    return loader is not None and bool(loader.has_token(ignore_auth_mode=True))


def _loader() -> Any:
    """None before Ray had tokens."""
    return _ray.AuthenticationTokenLoader.instance() if hasattr(_ray, "AuthenticationTokenLoader") else None
