"""The runner and the gateway as Serve replicas: they open what is shared, and hand it to the plain classes."""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.checkpoints import open_checkpointer
from deployments.gateway import check_exposure, create_app
from deployments.metrics import Text
from deployments.registry import Workflows
from deployments.remote import RUN_SERVICE, RemoteRunService, policies_of, texts_of
from deployments.runner import Runner
from deployments.service import RunEvent
from deployments.settings import AppArgs
from deployments.transport import HandleTransport
from pbkv_ray.config import ControllerOptions, RunnerOptions
from pbkv_ray.control.actor import renew_controller, start_controller
from pbkv_ray.control.client import ControllerClient
from pbkv_ray.control.exposition import controller_text
from pbkv_ray.control.pump import EventPump
from pbkv_ray.core.gate import Gate
from pbkv_ray.errors import InputError, UnavailableError
from pbkv_ray.routing.metrics import router_text
from pbkv_ray.store import Store
from workflows.tools.sandbox import refusal

logger = logging.getLogger(__name__)


def application() -> str:
    return str(serve.get_replica_context().app_name)


def listening_host() -> str | None:
    """The address that Serve's proxies listen on, which `AppArgs.host` only repeats; None without HTTP."""
    from ray.serve.context import _get_global_client  # what serves, no public function tells

    host: str | None = _get_global_client().http_config.host
    return host


class _Reporter:
    """This process's way to the controller: a pump, and the news that the controller has restarted."""

    def __init__(self, kind: str, application: str, controller: ControllerOptions) -> None:
        start_controller(application, controller)
        self.on_restart: Callable[[], None] = lambda: None  # tell it again which runs there are
        self.client = ControllerClient(application, on_new_epoch=lambda: self.on_restart())
        self.pump = EventPump(f"{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}", self.client.send)


def _gate(args: AppArgs) -> Gate:
    """Each runner sees its own runs only: its share of the engines. Autoscaled ones come on top, unnoticed."""
    engines = args.engine_replicas
    return Gate(args.device_pool_tokens * engines // args.runner_replicas, max(1, engines // args.runner_replicas))


class RunnerHost:
    """One runner. `engine` is the handle of the engine deployment."""

    async def __init__(self, args: AppArgs, engine: DeploymentHandle) -> None:  # type: ignore[misc]  # Serve awaits it
        if (said := await asyncio.to_thread(refusal)) is not None:
            logger.warning("workflows that test code will fail on this node: %s", said)
        self._opened = AsyncExitStack()
        database = args.database_url(application())
        store = await Store.open(database)
        self._opened.push_async_callback(store.close)
        checkpointer = await self._opened.enter_async_context(open_checkpointer(database))
        controller_options = args.controller_options(application())
        await asyncio.to_thread(renew_controller, application(), controller_options)
        reporter = _Reporter("runner", application(), controller_options)
        self._opened.push_async_callback(reporter.pump.close)
        self._runner = Runner(
            store,
            checkpointer,
            Workflows(args.registry),
            HandleTransport(engine),
            reporter.pump.emit,
            RunnerOptions(max_running=args.max_running),
            gate=_gate(args) if args.admission else None,
        )
        self._opened.push_async_callback(self._runner.close)
        reporter.on_restart = self._runner.announce
        await self._runner.start()

    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method not in RUN_SERVICE:
            raise InputError(f"the runner has no method {method!r}")
        return await getattr(self._runner, method)(*arguments)

    async def stream_run(self, thread_id: str | None, run_id: str, after: int) -> AsyncIterator[RunEvent]:
        async with aclosing(self._runner.stream_run(thread_id, run_id, after)) as events:
            async for event in events:
                yield event

    async def labelled_metrics(self) -> tuple[str, str]:
        """This replica's id, and its metrics as a Prometheus text."""
        return str(serve.get_replica_context().replica_id.unique_id), self._runner.metrics_text() + router_text()

    async def __del__(self) -> None:
        """Serve awaits it: runs in flight go back to the queue, for the next runner."""
        if (opened := getattr(self, "_opened", None)) is not None:
            await opened.aclose()


@serve.ingress()
class GatewayHost:
    """One HTTP gateway."""

    def __init__(self, args: AppArgs, runner: DeploymentHandle, engine: DeploymentHandle) -> None:
        self._args = args
        self._runner = runner
        self._engine = engine

    async def __serve_build_asgi_app__(self) -> FastAPI:  # the name is Serve's
        if (host := await asyncio.to_thread(listening_host)) is not None:
            check_exposure(host, self._args.gateway_options())
        self._reporter = _Reporter("gateway", application(), self._args.controller_options(application()))

        async def policies(policy: str | None, replica: str | None) -> Mapping[str, dict[str, Any]]:
            if policy is not None and replica is None:
                with suppress(UnavailableError):  # the engines that run are told all the same
                    await self._reporter.client.order_policy(policy)
            return await policies_of(self._engine, policy, replica)

        async def router() -> Text:
            return router_text()

        async def controller() -> Text:
            return controller_text(await self._reporter.client.counts())

        app = create_app(
            RemoteRunService(self._runner),
            HandleTransport(self._engine),
            self._args.gateway_options(),
            workflows={spec.name: spec.description for spec in Workflows(self._args.registry)},
            emit=self._reporter.pump.emit,
            metrics_parts={
                "engine": lambda: texts_of(self._engine),
                "runner": lambda: texts_of(self._runner),
                "controller": controller,
                "router": router,
            },
            watch=self._reporter.client.live,
            policies=policies,
            about={"model": self._args.model, "policy": self._args.policy},
        )
        self._reporter.on_restart = app.state.foreign.announce
        return app
