"""A runner that dies while the gateway asks it: what may be asked again is, what may not is told."""

from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.remote import RemoteRunService
from deployments.service import RunEvent
from pbkv_ray.errors import NotFoundError, UnavailableError

EVENTS = [RunEvent(seq, "values", "{}") for seq in range(1, 6)]


class FakeHandle:
    """A Serve handle whose runner dies `deaths` times: in a call, or after each second event of a stream."""

    def __init__(self, deaths: int, error: Callable[[], Exception] = ActorDiedError) -> None:
        self.deaths = deaths
        self.error = error
        self.asked: list[Any] = []
        self.call = SimpleNamespace(remote=self._call)
        self.stream_run = SimpleNamespace(remote=self._stream)

    def options(self, stream: bool) -> "FakeHandle":
        return self

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.asked.append((method, arguments))
        self._perhaps_die()
        return {"status": "success"}

    async def _stream(self, thread_id: str | None, run_id: str, after: int) -> AsyncIterator[RunEvent]:
        self.asked.append(after)
        for number, event in enumerate(EVENTS[after:]):
            if number == 2:
                self._perhaps_die()
            yield event

    def _perhaps_die(self) -> None:
        if self.deaths:
            self.deaths -= 1
            raise self.error()


async def test_a_question_is_asked_again_of_the_next_runner():
    handle = FakeHandle(deaths=2)
    assert await RemoteRunService(handle, pause_s=0.0).get_run(None, "r1") == {"status": "success"}
    assert handle.asked == [("get_run", (None, "r1"))] * 3


async def test_a_run_is_not_created_twice():
    handle = FakeHandle(deaths=1)
    with pytest.raises(UnavailableError, match="the runner's replica died during the call"):
        await RemoteRunService(handle, pause_s=0.0).create_run("request")
    assert len(handle.asked) == 1


async def test_what_the_runner_answers_is_no_reason_to_ask_again():
    handle = FakeHandle(deaths=1, error=lambda: NotFoundError("no run r1"))
    with pytest.raises(NotFoundError, match="no run r1"):
        await RemoteRunService(handle, pause_s=0.0).get_run(None, "r1")


async def test_a_runner_that_is_not_coming_back_is_an_error_in_the_end():
    with pytest.raises(UnavailableError):
        await RemoteRunService(FakeHandle(deaths=9), attempts=3, pause_s=0.0).get_run(None, "r1")


async def test_a_stream_goes_on_behind_the_event_that_was_seen_last():
    handle = FakeHandle(deaths=2)
    seen = [event async for event in RemoteRunService(handle, attempts=2, pause_s=0.0).stream_run(None, "r1", 0)]
    assert seen == EVENTS
    assert handle.asked == [0, 2, 4]
