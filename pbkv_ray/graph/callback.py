"""A LangGraph callback that reports a run's life cycle. The runner attaches it; user graphs do not change.

It must never fail or delay a run: `emit` only queues, and LangChain logs and swallows what a handler raises.
Handlers run inline, since otherwise LangChain runs them in threads, out of order.
"""

from collections.abc import Callable, Sequence
from time import time
from typing import Any
from uuid import UUID

from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent
from langgraph.errors import GraphBubbleUp

from pbkv_ray.core.events import AgentEntered, AgentLeft, Event, Outcome, RunEnded, RunStarted, ToolWaiting


class LifecycleCallback(GraphCallbackHandler):
    """Events of one run, in order. `agents` names the graph nodes that call the LLM; all others are tools.

    `resumed`: an earlier attempt has said that the run started.

    `finish` may be called from outside, by a runner whose task was cancelled before LangGraph could say so;
    the first end counts.
    """

    run_inline = True
    raise_error = False
    ignore_llm = ignore_chat_model = True  # the LLM client tells of calls itself

    def __init__(
        self,
        run_id: str,
        workflow: str,
        agents: Sequence[str],
        edges: Sequence[tuple[str, str]],
        emit: Callable[[Event], None],
        *,
        clock: Callable[[], float] = time,
        resumed: bool = False,
    ) -> None:
        self._run_id = run_id
        self._workflow = workflow
        self._agents = frozenset(agents)
        self._announce = tuple(agents), tuple(edges)
        self._emit = emit
        self._clock = clock
        self._said = resumed
        self._root: UUID | None = None
        self._open: dict[UUID, tuple[str, int]] = {}  # agents that are executing now
        self._interrupted = False
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def start(self) -> None:
        agents, edges = self._announce
        self._emit(RunStarted(self._run_id, self._workflow, self._clock(), agents, edges, again=self._said))
        self._said = True

    def finish(self, outcome: Outcome) -> None:
        if self._ended:
            return
        self._ended = True
        for agent, step in self._open.values():
            self._emit(AgentLeft(self._run_id, agent, step, self._clock()))
        self._open.clear()
        self._emit(RunEnded(self._run_id, outcome, self._clock()))

    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: dict[str, Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if parent_run_id is None:
            self._root = run_id
            self.start()
            return
        metadata = metadata or {}
        name = metadata.get("langgraph_node")
        # The name and the tag together leave out routing functions and inner runnables of a node.
        if name != kwargs.get("name") or not any(tag.startswith("graph:step:") for tag in tags or ()):
            return
        step = int(metadata.get("langgraph_step", 0))
        if name in self._agents:
            self._open[run_id] = name, step
            self._emit(AgentEntered(self._run_id, name, step, self._clock()))
        else:
            self._emit(ToolWaiting(self._run_id, str(name), step, self._clock()))

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        if run_id == self._root:
            self.finish("interrupted" if self._interrupted else "completed")
        else:
            self._leave(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        if run_id != self._root:
            self._leave(run_id)
        elif isinstance(error, GraphBubbleUp):
            self.finish("interrupted")
        else:
            self.finish("failed" if isinstance(error, Exception) else "cancelled")

    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        self._interrupted = True
        self._emit(ToolWaiting(self._run_id, "interrupt", 0, self._clock()))

    def _leave(self, run_id: UUID) -> None:
        if (agent := self._open.pop(run_id, None)) is not None:
            self._emit(AgentLeft(self._run_id, *agent, self._clock()))
