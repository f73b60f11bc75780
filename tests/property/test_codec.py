"""Every registered kind survives the round trip, and nothing but a MessageError comes out of broken text."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rota.execute.events
import rota.runtime.messages
from rota import codec
from rota.errors import MessageError

KINDS = sorted(codec._KINDS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


SIMPLE = {str: st.text(max_size=20), int: st.integers(), float: st.floats(), bool: st.booleans()}
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._=,+@-]{0,20}", fullmatch=True)


def bounded(hint: Any, bound: Any) -> st.SearchStrategy[Any]:
    """Any value within what stands beside a type."""
    if isinstance(bound, codec.Within):
        return {int: st.integers, float: st.floats}[hint](int(bound.least), int(bound.most))
    if isinstance(bound, codec.Fits):
        return NAMES
    keys = {key: values_of(one) for key, one in bound.needed.items()}
    return st.fixed_dictionaries(keys, optional={key: values_of(one) for key, one in bound.optional.items()}).map(
        lambda value: json.loads(json.dumps(value))
    )


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field with this type can have."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return bounded(*arguments)
    if hint is Any:
        return JSON
    if origin in (typing.Union, types.UnionType):
        return st.one_of([st.none() if one is type(None) else values_of(one) for one in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=4)
    return SIMPLE[hint]


def messages_of(kind: str) -> st.SearchStrategy[Any]:
    cls = codec._KINDS[kind]
    hints = typing.get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(cls)})


MESSAGES = st.sampled_from(KINDS).flatmap(messages_of)


def test_the_kinds_of_messages_and_events_are_all_here():
    named = typing.get_args(rota.runtime.messages.Command) + typing.get_args(rota.runtime.messages.Report)
    named += typing.get_args(rota.execute.events.Event)
    assert {cls.__name__ for cls in named} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_every_kind_is_decoded_as_it_was_encoded(kind, data):
    message = data.draw(messages_of(kind))
    decoded = codec.decode(*codec.encode(message))
    assert type(decoded) is type(message)
    assert repr(decoded) == repr(message)  # unlike ==, tells NaN, -0.0, 1 and True apart


@given(kind=st.sampled_from(KINDS), text=st.text(max_size=40) | st.binary(max_size=40))
def test_arbitrary_text_is_a_message_or_a_message_error(kind, text):
    with contextlib.suppress(MessageError):
        assert type(codec.decode(kind, text)).__name__ == kind


@given(kind=st.text(max_size=12), text=st.text(max_size=12))
def test_an_arbitrary_kind_is_a_message_error(kind, text):
    if kind not in KINDS:
        with pytest.raises(MessageError):
            codec.decode(kind, text)


@settings(max_examples=200)
@given(data=st.data())
def test_fields_of_any_json_type_are_checked_against_their_hints(data):
    kind = data.draw(st.sampled_from(KINDS))
    names = [field.name for field in dataclasses.fields(codec._KINDS[kind])]
    fields = data.draw(st.dictionaries(st.sampled_from([*names, "other"]), JSON, max_size=len(names) + 1))
    try:
        decoded = codec.decode(kind, json.dumps(fields))
    except MessageError:
        return
    again = codec.decode(*codec.encode(decoded))
    assert repr(again) == repr(decoded)


@settings(max_examples=200)
@given(message=MESSAGES, data=st.data())
def test_a_mutated_text_is_a_message_or_a_message_error(message, data):
    kind, text = codec.encode(message)
    raw = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MessageError):
        codec.decode(kind, bytes(raw))
