"""The runner seen from the gateway: a Serve handle behind the protocol that the gateway knows.

A runner that dies takes the requests with it that it was answering. What only reads, or may be said twice, is asked
again of the next one; a stream goes on behind the event that was seen last. The others get the error.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.service import RunEvent, RunService
from deployments.transport import replica_died, translated

RUN_SERVICE = frozenset(
    name for name in vars(RunService) if not name.startswith("_") and name != "stream_run"
)  # one answer a call
ONCE = frozenset(("create_thread", "delete_thread", "update_state", "create_run", "delete_run"))


class RemoteRunService:
    """`deployments.service.RunService` over the runner's handle. `attempts` in all, after `pause_s`, then twice it."""

    def __init__(self, handle: DeploymentHandle, *, attempts: int = 6, pause_s: float = 0.5) -> None:
        self._handle = handle
        self._attempts = attempts
        self._pause_s = pause_s

    def __getattr__(self, method: str) -> Any:
        if method not in RUN_SERVICE:
            raise AttributeError(method)

        async def call(*arguments: Any) -> Any:
            for attempt in range(1, self._attempts + 1):
                try:
                    return await self._handle.call.remote(method, arguments)
                except Exception as error:
                    if method in ONCE or attempt == self._attempts or not replica_died(error):
                        raise translated(error, "runner") from error
                await asyncio.sleep(self._pause_s * 2 ** (attempt - 1))

        return call

    async def stream_run(self, thread_id: str | None, run_id: str, after: int) -> AsyncIterator[RunEvent]:
        attempt = 0
        while True:
            events = self._handle.options(stream=True).stream_run.remote(thread_id, run_id, after)
            ended = False
            try:
                async for event in events:
                    attempt, after = 0, event.seq
                    yield event
                ended = True
                return
            except Exception as error:
                ended, attempt = True, attempt + 1
                if attempt == self._attempts or not replica_died(error):
                    raise translated(error, "runner") from error
            finally:
                if not ended:
                    events.cancel()
            await asyncio.sleep(self._pause_s * 2 ** (attempt - 1))


async def policies_of(handle: DeploymentHandle, policy: str | None, replica: str | None) -> dict[str, dict[str, Any]]:
    """Each engine replica's cache policy, after `policy` was ordered of one of them, or of all (deployments.engine)."""
    responses = handle.broadcast("policy", policy, replica)
    answers = await responses.results_async(timeout_s=20.0, return_exceptions=True)
    return dict(answer for answer in answers if isinstance(answer, tuple))


async def texts_of(handle: DeploymentHandle, timeout_s: float = 2.0) -> dict[str, str]:
    """Each replica's metrics text."""
    answers = await handle.broadcast("labelled_metrics").results_async(timeout_s=timeout_s, return_exceptions=True)
    return dict(answer for answer in answers if isinstance(answer, tuple))
