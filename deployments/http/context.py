"""What the routes share, and the tasks that outlive the request that started them."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from deployments.http.assistants_table import Assistants
from deployments.http.auth import Tenant
from deployments.http.options import GatewayOptions
from deployments.http.tenancy import TenantRuns
from deployments.metrics import GatewayMetrics
from deployments.service import RunService

log = logging.getLogger(__name__)


class Tasks:
    """Keeps tasks alive and their failures in sight."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s failed: %r", task.get_name(), error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Gateway:
    service: RunService
    assistants: Assistants
    options: GatewayOptions
    metrics: GatewayMetrics
    tasks: Tasks = field(default_factory=Tasks)

    def tenant(self, request: Request) -> Tenant | None:
        found: Tenant | None = request.state.tenant
        return found

    def runs(self, request: Request) -> RunService:
        """The run service as the request's tenant may use it."""
        tenant = self.tenant(request)
        return self.service if tenant is None else TenantRuns(self.service, tenant.label)
