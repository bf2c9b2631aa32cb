"""Events reach every listener, cost nothing to ignore, and always end."""

from __future__ import annotations

import os
import signal

import pytest

from mt_megatron.seams import events


@pytest.fixture
def seen():
    found = []
    stop = events.subscribe(lambda phase, name, attrs: found.append((phase, name, dict(attrs))))
    yield found
    stop()
    assert not events.listening()


def test_nobody_listens_by_default():
    assert not events.listening()
    events.begin("layer", number=1)
    events.end("layer")
    with events.span("layer"):
        pass


def test_listener_sees_names_phases_and_attributes(seen):
    events.begin("layer", number=3)
    with events.span("collective", bytes=8):
        pass
    events.end("layer", output=1)
    assert seen == [
        ("begin", "layer", {"number": 3}),
        ("begin", "collective", {"bytes": 8}),
        ("end", "collective", {}),
        ("end", "layer", {"output": 1}),
    ]


def test_span_ends_when_its_body_raises(seen):
    with pytest.raises(KeyError), events.span("step"):
        raise KeyError
    assert [phase for phase, _, _ in seen] == ["begin", "end"]


def test_span_entered_idle_stays_idle():
    found = []
    with events.span("step"):
        stop = events.subscribe(lambda phase, name, attrs: found.append(phase))
    stop()
    assert found == []


def test_every_listener_hears_and_each_leaves_alone():
    first, second = [], []

    def listen_first(phase, name, attrs):
        first.append(name)

    stop_first = events.subscribe(listen_first)
    stop_again = events.subscribe(listen_first)
    stop_second = events.subscribe(lambda phase, name, attrs: second.append(name))
    events.begin("data")
    stop_first()
    stop_first()
    events.begin("step")
    stop_again()
    events.begin("layer")
    stop_second()
    assert first == ["data", "data", "step"]
    assert second == ["data", "step", "layer"]
    assert not events.listening()


def test_what_a_listener_raises_reaches_the_step():
    def broken(phase, name, attrs):
        raise RuntimeError("listener")

    stop = events.subscribe(broken)
    try:
        with pytest.raises(RuntimeError, match="listener"):
            events.begin("step")
    finally:
        stop()


def test_a_child_that_is_forked_while_somebody_subscribes_is_not_stuck():
    with events._subscribing:
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(10)
                events.subscribe(lambda phase, name, attrs: None)()
                os._exit(0)
            finally:
                # Whatever was raised, one process goes on with the tests.
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
