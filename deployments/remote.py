"""The runner seen from the gateway: a Serve handle behind the protocol that the gateway knows."""

from collections.abc import AsyncIterator
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.service import RunEvent, RunService
from deployments.transport import translated

RUN_SERVICE = frozenset(
    name for name in vars(RunService) if not name.startswith("_") and name != "stream_run"
)  # one answer a call


class RemoteRunService:
    """`deployments.service.RunService` over the runner's handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def __getattr__(self, method: str) -> Any:
        if method not in RUN_SERVICE:
            raise AttributeError(method)

        async def call(*arguments: Any) -> Any:
            try:
                return await self._handle.call.remote(method, arguments)
            except Exception as error:
                raise translated(error, "runner") from error

        return call

    async def stream_run(self, thread_id: str | None, run_id: str, after: int) -> AsyncIterator[RunEvent]:
        events = self._handle.options(stream=True).stream_run.remote(thread_id, run_id, after)
        ended = False
        try:
            async for event in events:
                yield event
            ended = True
        except Exception as error:
            ended = True
            raise translated(error, "runner") from error
        finally:
            if not ended:
                events.cancel()


async def texts_of(handle: DeploymentHandle, timeout_s: float = 2.0) -> dict[str, str]:
    """Each replica's metrics text."""
    answers = await handle.broadcast("labelled_metrics").results_async(timeout_s=timeout_s, return_exceptions=True)
    return dict(answer for answer in answers if isinstance(answer, tuple))
