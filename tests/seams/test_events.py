"""Events reach every listener, cost nothing to ignore, and always end."""

from __future__ import annotations

import os
import signal
import threading
import time

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


def test_a_listener_may_ask_for_some_names_only():
    some, everything = [], []
    stops = [
        events.subscribe(lambda phase, name, attrs: some.append((phase, name)), {"step"}),
        events.subscribe(lambda phase, name, attrs: everything.append((phase, name))),
    ]
    with events.span("step"), events.span("layer"):
        events.begin("data")
    for stop in stops:
        stop()
    assert some == [("begin", "step"), ("end", "step")]
    assert [name for _, name in everything] == ["step", "layer", "data", "layer", "step"]


@pytest.fixture
def recorded():
    kept = []
    stop = events.record(kept.append, {"collective", "layer"})
    yield kept
    stop()
    assert not events.listening()


def test_what_is_recorded_is_a_span_that_learns_its_end(recorded):
    before = time.perf_counter_ns()
    with events.span("collective", bytes=8):
        (span,) = recorded
        assert before <= span.begun <= time.perf_counter_ns() and not span.ended
        with events.described("layer", {"number": 1}), events.span("step"):
            pass
    assert [(each.name, each.attrs) for each in recorded] == [
        ("collective", {"bytes": 8}),
        ("layer", {"number": 1}),
    ]
    outer, inner = recorded
    assert outer.begun <= inner.begun <= inner.ended <= outer.ended <= time.perf_counter_ns()
    assert outer.thread == threading.get_ident()


def test_begins_and_ends_are_recorded_one_by_one(recorded):
    events.begin("layer", number=2)
    events.end("layer", output=1)
    events.begin("data")
    assert [each[1:] for each in recorded] == [
        (threading.get_ident(), "begin", "layer", {"number": 2}),
        (threading.get_ident(), "end", "layer", {"output": 1}),
    ]
    assert recorded[0][0] <= recorded[1][0]


def test_a_span_is_recorded_around_what_its_listeners_do(recorded):
    heard = []

    def listen(phase, name, attrs):
        heard.append((phase, bool(recorded[-1].ended)))

    stop = events.subscribe(listen, {"layer"})
    with pytest.raises(KeyError), events.span("layer"):
        raise KeyError
    stop()
    assert heard == [("begin", False), ("end", True)] and len(recorded) == 1


def test_who_stops_recording_in_the_middle_still_learns_the_end():
    kept = []
    stop = events.record(kept.append, {"layer"})
    made = events.span("layer")
    with events.span("layer"):
        stop()
    with made, events.span("layer"):
        pass
    assert len(kept) == 2 and all(each.ended for each in kept)


def test_two_may_record():
    first, second = [], []
    stops = [events.record(each.append, {"layer"}) for each in (first, second)]
    with events.span("layer"):
        pass
    for stop in stops:
        stop()
    assert len(first) == 1 and first == second
