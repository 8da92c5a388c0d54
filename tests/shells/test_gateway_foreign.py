"""Foreign harnesses: their names for run and agent, the runs that these stand for, and what an answer cost."""

from typing import Any

import pytest

from deployments.http.foreign import ForeignRuns, Usage, usage_of
from deployments.http.identity import BODY, HEADERS, Identity, identify
from deployments.http.openai_stream import ChatStream
from deployments.metrics import GatewayMetrics
from pbkv_ray.core.events import CallFinished, RunEnded, RunStarted
from pbkv_ray.errors import InputError

AT = 1_000.0


@pytest.mark.parametrize(("header", "field"), HEADERS)
def test_every_header_alias_names_its_field(header: str, field: str) -> None:
    value = "true" if field == "final" else "abc"
    assert identify({header: value}, {}) == Identity(**{field: True if field == "final" else "abc"})


@pytest.mark.parametrize(("path", "field"), BODY)
def test_every_body_alias_names_its_field(path: tuple[str, ...], field: str) -> None:
    body: Any = True if field == "final" else "abc"
    for part in reversed(path):
        body = {part: body}
    assert identify({}, body) == Identity(**{field: True if field == "final" else "abc"})


def test_our_own_names_come_first_and_headers_before_the_body() -> None:
    headers = {"session-id": "codex", "x-dynamo-session-id": "dynamo", "x-pbkv-run-id": "ours"}
    assert identify(headers, {"session_id": "sglang"}).run_id == "ours"
    del headers["x-pbkv-run-id"]
    assert identify(headers, {"session_id": "sglang"}).run_id == "dynamo"
    assert identify({}, {"session_id": "sglang", "program_id": "thunder"}).run_id == "thunder"


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        ({"x-pbkv-run-id": ""}, {}, "header x-pbkv-run-id is ''; an id is 1 to 160 printable characters"),
        ({"x-session-id": "a" * 161}, {}, "header x-session-id is"),
        ({"x-pbkv-agent": "a\tb"}, {}, r"header x-pbkv-agent is 'a\\tb'"),
        ({"x-pbkv-run-final": "maybe"}, {}, "header x-pbkv-run-final is 'maybe'; it must be true or false"),
        ({}, {"program_id": 7}, "field program_id is 7; an id is"),
        ({}, {"nvext": {"agent_context": {"trajectory_final": 1}}}, "field nvext.agent_context.trajectory_final is 1"),
    ],
)
def test_an_id_that_cannot_be_one_is_refused(headers: dict[str, str], body: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        identify(headers, body)


def test_a_chunk_of_cache_tiers_is_read_and_kept_from_who_did_not_ask() -> None:
    """SGLang sends the tiers in a chunk without choices, on which a client that reads choices[0] would break."""
    tiers = b'data: {"choices": [], "sglext": {"cached_tokens_details": {"device": 12, "host": 8}}}\n\n'
    said = b'data: {"choices": [{"finish_reason": "length"}], "usage": null}\n\n'
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 4}}\n\n'
    both = b'data: {"choices": [{"delta": {}}], "usage": {"prompt_tokens": 29, "completion_tokens": 1}}\n\n'
    hides = ChatStream(shows_usage=False, shows_tiers=False)
    assert hides.passed(both) == b'data: {"choices": [{"delta": {}}], "usage": null}\n\n'
    assert hides.passed(said + tiers + usage + b"data: [DONE]\n\n") == said + b"data: [DONE]\n\n"
    assert (hides.reason, hides.usage) == ("length", Usage(30, 4, 12, 8))
    shows = ChatStream(shows_usage=True, shows_tiers=True)
    assert shows.passed(both + said + tiers + usage) == both + said + tiers + usage
    breaks = ChatStream(shows_usage=False, shows_tiers=False)
    assert (
        breaks.passed(b'data: {"error": {"message": "no"}}\n\ndata: {"cut') == b'data: {"error": {"message": "no"}}\n\n'
    )
    assert (breaks.reason, breaks.rest()) == ("error", b'data: {"cut')


def _foreign(capacity: int, events: list[Any], metrics: GatewayMetrics, clock: Any = lambda: AT) -> ForeignRuns:
    return ForeignRuns(events.append, capacity, metrics, lease_s=600, repeat_s=60, clock=clock)


def _started(events: list[Any]) -> list[str]:
    return [event.run_id for event in events if isinstance(event, RunStarted)]


def test_the_table_of_foreign_runs_is_bounded_and_says_what_it_forgot() -> None:
    metrics, events = GatewayMetrics(), []
    runs = _foreign(2, events, metrics)
    first = runs.begin(Identity(run_id="1"), None)
    for name in ("2", "3"):
        runs.finish(runs.begin(Identity(run_id=name), None), "stop")
    runs.finish(first, "length", Usage(5, 3, 2, 1, "r0"))  # its run was forgotten; the call's end is told all the same
    runs.finish(runs.begin(Identity(run_id="1"), None), "stop")
    assert _started(events) == ["ext:1", "ext:2", "ext:3", "ext:1"]
    assert CallFinished("ext:1", "default", 0, first.call_id, AT, "length", 5, 3, 2, 1, 0.0, "r0") in events
    assert metrics.registry.get_sample_value("pbkv_foreign_runs_forgotten_total") == 2
    assert metrics.registry.get_sample_value("pbkv_foreign_runs") == 2


def test_a_name_that_comes_back_after_its_end_is_a_new_run() -> None:
    """The controller takes what comes for an ended run for late, so the same id would be ignored."""
    now, events = [AT], []
    runs = _foreign(8, events, GatewayMetrics(), lambda: now[0])
    runs.finish(runs.begin(Identity(run_id="s", final=True), None), "stop")
    again = runs.begin(Identity(run_id="s"), None)
    now[0] += 5_000  # an open call keeps its run, however long it takes
    sibling = runs.begin(Identity(run_id="s"), None)
    for call in (again, sibling):
        runs.finish(call, "stop")
    now[0] += 601
    after_the_lease = runs.begin(Identity(run_id="s"), None)
    callers = [call.caller for call in (again, sibling, after_the_lease)]
    assert [(caller.run_id, caller.step) for caller in callers if caller] == [
        ("ext:s~2", 0),
        ("ext:s~2", 1),
        ("ext:s~3", 0),
    ]
    assert [event.run_id for event in events if isinstance(event, RunEnded)] == ["ext:s"]


def test_a_long_run_is_named_again_for_a_controller_that_has_forgotten_it() -> None:
    now, events = [AT], []
    runs = _foreign(8, events, GatewayMetrics(), lambda: now[0])
    for pause_s in (0, 30, 31, 1):
        now[0] += pause_s
        runs.finish(runs.begin(Identity(run_id="s"), None), "stop")
    assert [(event.run_id, event.at_s) for event in events if isinstance(event, RunStarted)] == [
        ("ext:s", AT),
        ("ext:s", AT + 61),
    ]


def test_a_controller_that_restarted_hears_of_a_run_with_its_next_call() -> None:
    events: list[Any] = []
    runs = _foreign(8, events, GatewayMetrics())
    runs.finish(runs.begin(Identity(run_id="s"), None), "stop")
    runs.announce()
    runs.finish(runs.begin(Identity(run_id="s"), None), "stop")
    assert _started(events) == ["ext:s", "ext:s"]


def test_usage_reads_sglangs_tiers() -> None:
    usage = {"prompt_tokens": 30, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 20}}
    assert usage_of({"usage": usage}) == Usage(30, 4, 20, 0)
    tiers = {"cached_tokens_details": {"device": 12, "host": 8}}
    assert usage_of({"usage": usage, "sglext": tiers}) == Usage(30, 4, 12, 8)
    assert usage_of({"usage": None}) is None
    assert usage_of({"usage": {"prompt_tokens": "many", "completion_tokens": -1}}) == Usage()
