"""Which run the current code belongs to, without a change to the user's graph.

The runner sets the run in a context variable, which asyncio tasks and LangGraph's threads inherit; the agent and
the step come from LangGraph's own metadata of the graph node that is executing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from langchain_core.runnables.config import var_child_runnable_config

from pbkv_ray.core.calls import Caller
from pbkv_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunContext:
    """`cache_salt` separates tenants; it is kept out of LangGraph's metadata, which checkpoints store."""

    run_id: str
    workflow: str
    cache_salt: str | None = None


_current: ContextVar[RunContext | None] = ContextVar("pbkv_run", default=None)


@contextmanager
def running(context: RunContext) -> Iterator[None]:
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_run() -> RunContext:
    """Raises ConfigError outside a run."""
    context = _current.get()
    if context is None:
        raise ConfigError("the LLM client was called outside a run; wrap the call in graph.context.running(...)")
    return context


def current_caller() -> Caller:
    """The run, agent and step that the current code belongs to. Raises ConfigError outside a run."""
    run = current_run()
    metadata = (var_child_runnable_config.get() or {}).get("metadata") or {}
    agent = str(metadata.get("langgraph_node", "default"))
    return Caller(run.run_id, run.workflow, agent, int(metadata.get("langgraph_step", 0)))
