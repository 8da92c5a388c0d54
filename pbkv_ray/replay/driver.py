"""One replica's cache under one policy, told what a scheduler and a controller would tell it."""

from collections.abc import Sequence
from typing import Any, Protocol

from pbkv_ray.replay.policies import attach_gdsf, stock_options
from pbkv_ray.replay.prefetch import SimulatedPrefetch
from pbkv_ray.replay.tree import Tree, TreeOptions, TreeRequest


class Driver(Protocol):
    """The life of runs, in order of `at_s`. `tree` is what requests are served from."""

    tree: Tree
    prefetch: SimulatedPrefetch | None

    def request(self, rid: str, run_id: str, agent: str, workflow: str, prompt: Any, tail: bool) -> TreeRequest: ...
    def call_started(self, run_id: str, workflow: str, history: Sequence[str], at_s: float) -> None:
        """`history` ends with the agent that calls now."""

    def call_finished(self, run_id: str, workflow: str, history: Sequence[str], tokens: int, at_s: float) -> None:
        """The last call of `history` was answered with so many tokens."""

    def run_ended(self, run_id: str, workflow: str, history: Sequence[str], at_s: float) -> None: ...


class StockDriver:
    """SGLang's own policies: only the session-aware one hears of runs, through SGLang's session calls."""

    prefetch: SimulatedPrefetch | None = None

    def __init__(self, policy: str, base: TreeOptions, unit_tokens: int) -> None:
        self.tree = Tree(stock_options(policy, base, unit_tokens))
        self._sessions = policy == "session"
        if policy == "gdsf":
            attach_gdsf(self.tree.cache)

    def request(self, rid: str, run_id: str, agent: str, workflow: str, prompt: Any, tail: bool) -> TreeRequest:
        made = TreeRequest(rid, prompt, {}, run_id if self._sessions else None, tail)
        if self._sessions:
            made.session_generation = self.tree.cache.session_refs.ensure_session_generation(run_id)
        return made

    def call_started(self, run_id: str, workflow: str, history: Sequence[str], at_s: float) -> None: ...
    def call_finished(self, run_id: str, workflow: str, history: Sequence[str], tokens: int, at_s: float) -> None: ...

    def run_ended(self, run_id: str, workflow: str, history: Sequence[str], at_s: float) -> None:
        if self._sessions:
            self.tree.cache.session_refs.release_radix_session(run_id)
