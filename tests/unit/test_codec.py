"""Only what `encode` made is decoded; everything else is a MessageError that says which field is wrong."""

from __future__ import annotations

import json

import pytest

from rota import codec
from rota.errors import MessageError
from rota.execute.events import Launched, RunBegan, RunResumed
from rota.runtime.messages import Beat, Measured, Shutdown

LAUNCHED = {"task": "a", "attempt": 1, "devices": ["cpu:0"], "strategy": ""}


def test_the_kind_is_the_name_of_the_class_and_the_text_is_its_fields():
    kind, text = codec.encode(Launched(**LAUNCHED | {"devices": ("cpu:0",)}))
    assert kind == "Launched"
    assert json.loads(text) == LAUNCHED


def test_a_message_without_fields_is_an_empty_object():
    assert codec.encode(Shutdown()) == ("Shutdown", "{}")
    assert codec.decode("Shutdown", "{}") == Shutdown()


def test_fields_with_defaults_may_be_missing():
    assert codec.decode("Beat", "{}") == Beat()


def test_lists_become_the_tuples_that_frozen_values_hold():
    text = '{"task":"a","attempt":1,"number":1,"rows":[[1,{"x":2}]],"latest":{},"step_s":0}'
    measured = codec.decode("Measured", text)
    assert measured == Measured(task="a", attempt=1, number=1, rows=((1, {"x": 2.0}),), latest={}, step_s=0.0)
    assert type(measured.rows[0][1]["x"]) is float
    assert codec.decode("RunResumed", '{"retried":["a","b"]}') == RunResumed(retried=("a", "b"))


def test_a_path_with_undecodable_bytes_survives():
    began = RunBegan(name="/tmp/\udcff", source="", source_digest="", sweep_digest="", tasks=(), devices=())
    assert codec.decode(*codec.encode(began)) == began


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("Nonsense", "{}", "'Nonsense'"),
        ("", "{}", "unknown kind"),
        ("Launched", "", "not JSON"),
        ("Launched", "{", "not JSON"),
        ("Launched", b"\xff\xfe\xfa", "not JSON"),
        ("Launched", "[" * 100_000, "not JSON"),
        ("Launched", "[]", "not a JSON object"),
        ("Launched", "null", "not a JSON object"),
        ("Launched", '{"task":"a"}', "incomplete"),
        ("Launched", '{"task":"a","attempt":1,"devices":["x"],"extra":1}', "unknown field 'extra'"),
        ("Launched", '{"task":1,"attempt":1,"devices":["x"]}', "Launched.task is int"),
        ("Launched", '{"task":"a","attempt":true,"devices":["x"]}', "Launched.attempt is bool"),
        ("Launched", '{"task":"a","attempt":1.0,"devices":["x"]}', "Launched.attempt is float"),
        ("Launched", '{"task":null,"attempt":1,"devices":["x"]}', "Launched.task is NoneType"),
        ("Beat", '{"retry":1}', "Beat.retry is int"),
        ("Beat", '{"phase_s":true}', "Beat.phase_s is bool"),
        ("Beat", '{"limit_s":"soon"}', "Beat.limit_s is str"),
        ("RunResumed", '{"retried":"ab"}', "RunResumed.retried is str"),
        ("RunResumed", '{"retried":[1]}', "RunResumed.retried is int"),
        ("Finished", '{"task":"a","attempt":1,"step":1,"metrics":{"a":"b"}}', "Finished.metrics is str"),
        ("Measured", '{"rows":[[1]]}', "Measured.rows is list"),
        ("Measured", '{"rows":[[1,{},3]]}', "Measured.rows is list"),
        ("Measured", '{"rows":{"1":{}}}', "Measured.rows is dict"),
    ],
)
def test_what_is_not_a_message_is_refused_and_named(kind, text, says, refused):
    assert says in refused(codec.decode, kind, text, error=MessageError)


def test_a_whole_number_too_large_for_a_float_field_is_refused():
    with pytest.raises(MessageError):
        codec.decode("Beat", '{"phase_s":1' + "0" * 400 + "}")


def test_a_registered_name_cannot_be_taken_twice():
    with pytest.raises(AssertionError, match="RunBegan"):
        codec.register(type("RunBegan", (), {}))
    assert type(codec.decode("RunResumed", "{}")) is RunResumed
    assert codec._KINDS["RunBegan"] is RunBegan
