"""Hints in, facts out: the two channels between a server and its scheduler, with real threads and sockets."""

import logging
import stat
import threading
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pbkv_ray.core.actions import PublishForecast
from pbkv_ray.core.calls import Caller
from pbkv_ray.core.events import Residency
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.engine.facts import Evicted, Fact, FactsReceiver, FactsSender, HiddenState, Pools
from pbkv_ray.engine.hints import (
    Owner,
    QuietPayloads,
    decode,
    encode,
    order,
    ordered_policy,
    owner_of,
    owner_params,
)
from pbkv_ray.engine.link import HintLink

WAIT_S = 30.0


def forecast(run: str, version: int, p: float = 1.0) -> PublishForecast:
    return PublishForecast(run, version, Forecast(("coder", "tester"), np.array([[p, 0.0, 1 - p]])), at_s=5.0)


class FakeScheduler:
    """Takes one payload at a time, and answers when it is told to."""

    def __init__(self) -> None:
        self.payloads: Queue[tuple[list[tuple[str, int]], list[str], float]] = Queue()
        self.answers: Queue[Exception | None] = Queue()

    def __call__(self, payload: str) -> None:
        forecasts, ended, now_s = decode(payload)
        self.payloads.put(([(hint.run_id, hint.version) for hint in forecasts], list(ended), now_s))
        answer = self.answers.get(timeout=WAIT_S)
        if answer is not None:
            raise answer

    def sent(self) -> tuple[list[tuple[str, int]], list[str], float]:
        return self.payloads.get(timeout=WAIT_S)


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


def test_while_one_message_is_under_way_only_the_newest_forecast_of_each_run_is_kept(
    scheduler: FakeScheduler,
) -> None:
    link = HintLink(scheduler, clock=lambda: 7.0)
    link.publish(forecast("a", 1))
    assert scheduler.sent() == ([("a", 1)], [], 7.0)
    for version in (2, 3, 4):
        link.publish(forecast("a", version))
    link.publish(forecast("b", 9))
    link.publish(forecast("b", 8))  # came late
    link.retire("c", 6.0)
    scheduler.answers.put(None)
    assert scheduler.sent() == ([("a", 4), ("b", 9)], ["c"], 7.0)
    scheduler.answers.put(None)
    link.tick()
    assert scheduler.sent() == ([], [], 7.0)
    scheduler.answers.put(None)
    link.close(WAIT_S)
    assert (link.count.coalesced, link.count.dropped, link.count.forecasts) == (3, 0, 3)


def test_an_ending_overtakes_the_forecasts_of_its_run(scheduler: FakeScheduler) -> None:
    link = HintLink(scheduler, clock=lambda: 7.0)
    link.tick()
    scheduler.sent()
    link.publish(forecast("a", 1))
    link.retire("a", 6.0)
    link.publish(forecast("a", 2))
    scheduler.answers.put(None)
    assert scheduler.sent() == ([], ["a"], 7.0)
    scheduler.answers.put(None)
    link.close(WAIT_S)


def test_a_dead_scheduler_costs_its_server_nothing_but_a_bounded_table(scheduler: FakeScheduler) -> None:
    link = HintLink(scheduler, max_pending=10)
    link.tick()
    scheduler.sent()  # and it never answers
    for number in range(100):
        link.publish(forecast(f"run{number}", 1))
        link.retire(f"old{number}")
    assert link.count.dropped == 180
    link.close(0.01)
    scheduler.answers.put(None)


def test_a_broadcast_that_fails_is_counted_and_its_endings_are_said_again(scheduler: FakeScheduler) -> None:
    link = HintLink(scheduler, clock=lambda: 7.0, retry_s=0.0)
    link.retire("a", 6.0)
    assert scheduler.sent()[1] == ["a"]
    scheduler.answers.put(RuntimeError("a rank raised"))
    assert scheduler.sent()[1] == ["a"]
    scheduler.answers.put(None)
    link.close(WAIT_S)
    assert (link.count.sent, link.count.failed) == (1, 1)


def test_a_forecast_arrives_as_it_was_sent_to_four_digits() -> None:
    wait_s = np.array([1.25, 3.5])
    sent = PublishForecast("run", 3, Forecast(("a", "b"), np.array([[1 / 3, 2 / 3, 0], [0, 0.5, 0.5]]), wait_s), 12.5)
    (received,), ended, now_s = decode(encode([sent], {"old": 11.0}, 13.0))
    assert (received.run_id, received.version, received.at_s, ended, now_s) == ("run", 3, 12.5, {"old": 11.0}, 13.0)
    assert received.forecast.agents == ("a", "b")
    assert received.forecast.wait_s is not None
    np.testing.assert_array_equal(received.forecast.step, [[0.3333, 0.6667, 0], [0, 0.5, 0.5]])
    np.testing.assert_array_equal(received.forecast.wait_s, wait_s)


@pytest.mark.parametrize(
    ("params", "owner"),
    [
        (owner_params(Caller("run", "flow", "coder", 3)), Owner("run", "coder", "flow")),
        ({"run": "run", "agent": "coder"}, Owner("run", "coder", "")),
        (None, None),
        ({}, None),
        ({"run": "", "agent": "coder"}, None),
        ({"run": 7, "agent": "coder"}, None),
        ({"run": "run", "agent": ["coder"]}, None),
    ],
)
def test_a_request_without_a_proper_owner_is_foreign(params: Any, owner: Owner | None) -> None:
    assert owner_of(SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params))) == owner


def test_payloads_stay_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("a scheduler")
    log.addFilter(QuietPayloads())
    with caplog.at_level(logging.INFO, log.name):
        log.info("handle_rpc_request: pbkv_apply, param: {'payload': '...'}")
        log.info("handle_rpc_request: save_remote_model, param: {}")
    assert caplog.messages == ["handle_rpc_request: save_remote_model, param: {}"]


def test_facts_arrive_whole_through_a_socket_that_only_this_user_reaches() -> None:
    heard: Queue[Fact] = Queue()
    receiver = FactsReceiver(heard.put, replica="r1", epoch="e1")
    folder = Path(receiver.endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    sender = FactsSender(receiver.endpoint)
    vector = np.arange(4, dtype=np.float16)
    sender.send("residency", {"tokens": {"run": (30, 20)}, "queued": 11, "at": 5.0})
    sender.send(
        "evicted",
        {
            "tokens": {"device": {"retired": 3}},
            "partial": 1,
            "fallbacks": 0,
            "failures": 0,
            "recent": [["device", 3, "retired", 1.0]],
        },
    )
    sender.send("pools", {"tokens": {"device_pool": 64, "device_free": 8}})
    sender.hidden("call", "prefill", vector)
    assert heard.get(timeout=WAIT_S) == Residency("r1", "e1", 5.0, {"run": (30, 20)}, 11)
    assert heard.get(timeout=WAIT_S) == Evicted({"device": {"retired": 3}}, 1, 0, 0, (("device", 3, "retired", 1.0),))
    assert heard.get(timeout=WAIT_S) == Pools({"device_pool": 64, "device_free": 8})
    state = heard.get(timeout=WAIT_S)
    assert isinstance(state, HiddenState)
    assert (state.call_id, state.token, state.vector.tolist()) == ("call", "prefill", [0.0, 1.0, 2.0, 3.0])
    receiver.close()
    assert not folder.exists()


def test_an_order_is_tried_until_it_is_delivered_and_the_latest_one_counts() -> None:
    sent: list[str] = []
    broken = threading.Event()
    broken.set()

    def send(payload: str) -> None:
        if broken.is_set():
            raise ConnectionError("no scheduler")
        sent.append(payload)

    link = HintLink(send, retry_s=0.01)
    assert not link.order("lru", timeout_s=0.05)
    broken.clear()
    assert link.order("pbkv+", timeout_s=WAIT_S)
    link.close()
    assert [ordered_policy(payload) for payload in sent if ordered_policy(payload)][-1] == "pbkv+"
    assert link.count.failed > 0


def test_an_order_is_no_hint_and_a_hint_no_order() -> None:
    assert ordered_policy(order("lru")) == "lru"
    assert ordered_policy(encode([], {}, 1.0)) is None
    with pytest.raises(ValueError, match="'best' is unknown"):
        ordered_policy(order("best"))


def test_what_is_no_fact_and_a_listener_that_fails_are_counted_and_nothing_stops() -> None:
    heard = threading.Event()

    def listener(fact: Fact) -> None:
        heard.set()
        raise ValueError("a bad listener")

    receiver = FactsReceiver(listener)
    sender = FactsSender(receiver.endpoint)
    sender.send("gossip", {})
    sender._socket.send(b"\x80pickle")
    sender.send("residency", {"tokens": {}, "queued": 0, "at": 0.0})
    assert heard.wait(WAIT_S)
    receiver.close()
    assert (receiver.count.received, receiver.count.malformed, receiver.count.failed) == (1, 2, 1)


def test_a_scheduler_whose_server_is_gone_drops_facts_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # unix sockets have short names
    sender = FactsSender("ipc://nobody")
    for _ in range(3_000):
        sender.send("residency", {"tokens": {}, "queued": 0, "at": 0.0})
    assert sender.dropped > 1_000
