"""Our plug-in's policies in a replay: the engine's own cache classes, told what the controller would tell them."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pbkv_ray.core.calls import Caller
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.ghost import LearnedReuse, Seen, block_hashes
from pbkv_ray.core.owners import OwnersOptions
from pbkv_ray.core.reuse import ReuseIndex
from pbkv_ray.core.scores import Score, score_of
from pbkv_ray.core.waits import WaitingTimes
from pbkv_ray.engine.policies import BACKEND, RadixOptions
from pbkv_ray.predict.counts import VariableOrderCounts
from pbkv_ray.replay.forecasts import Forecasts, Made
from pbkv_ray.replay.keys import Keys
from pbkv_ray.replay.order import OrderedCall
from pbkv_ray.replay.prefetch import SimulatedPrefetch
from pbkv_ray.replay.tree import Tree, TreeOptions, TreeRequest
from pbkv_ray.replay.workload import BLOCK_TOKENS, Workload


class CoarseIndex(ReuseIndex[Any]):
    """An index of a tree whose units are whole blocks: it counts tokens all the same."""

    def add(self, node: Any, tokens: int, parent: Any = None) -> None:
        super().add(node, tokens * BLOCK_TOKENS, parent)

    def split(self, node: Any, new_parent: Any, tokens: int) -> None:
        super().split(node, new_parent, tokens * BLOCK_TOKENS)


class UnitReuse(LearnedReuse):
    """Learned reuse of a tree whose units are whole blocks: a unit is hashed as one token and counts as a block."""

    def __init__(self) -> None:
        super().__init__(BLOCK_TOKENS)
        self.block_tokens = 1

    def observe(self, workflow: str, run: str, agent: str, path: tuple[str, ...], blocks: Sequence[int]) -> Seen:
        seen = super().observe(workflow, run, agent, path, blocks)
        return seen._replace(shared_tokens=seen.shared_tokens * BLOCK_TOKENS)


@dataclass(slots=True)
class Memo:
    """What does not depend on the policy at a fixed order of calls; `order` says which order it belongs to."""

    order: tuple[object, ...] = ()
    forecasts: Made = field(default_factory=dict)
    learned: tuple[LearnedReuse, WaitingTimes] | None = None


class OwnedDriver:
    """A policy of `engine.policies` on the engine's OwnedRadixCache; hints are applied at once, in order.

    forecasts: what runs are expected to call. By default from counts that have seen nothing yet.
    memo:    what was learned beforehand; with it, forecasts. At a fixed order of calls both are the same for every
             policy: the first driver with the memo fills it, later ones skip the work.
    score, switches: experiments; None and empty are the policy as it is.
    """

    def __init__(
        self,
        policy: str,
        base: TreeOptions,
        unit_tokens: int,
        *,
        forecasts: Forecasts | None = None,
        memo: Memo | None = None,
        score: Score | None = None,
        owners: OwnersOptions | None = None,
        switches: Mapping[str, Any] | None = None,
    ) -> None:
        options = RadixOptions.of(policy, **(switches or {}))
        self.options = replace(options, partial_tokens=-(-options.partial_tokens // unit_tokens))
        self.forecasts = forecasts if forecasts is not None else Forecasts(VariableOrderCounts())
        self._unit, self._memo = unit_tokens, memo
        if memo is not None and not memo.forecasts:
            memo.learned = None  # nobody has replayed anything with it
        self.tree = Tree(
            replace(
                base,
                eviction_config=asdict(self.options),
                cache_class=_cache(),
                prepare=_select,
                on_first_slot=_tag,
            )
        )
        self.score = score or score_of(policy)
        self.learned = UnitReuse() if unit_tokens > 1 else LearnedReuse(BLOCK_TOKENS)
        self.waits = WaitingTimes()
        if memo is not None and memo.learned is not None:
            self.learned, self.waits = deepcopy(memo.learned)
        core = self.tree.cache.tree_core
        made = CoarseIndex if unit_tokens > 1 else ReuseIndex
        self.index = core.index = made(
            self.score,
            owners or OwnersOptions(max_age_s=self.options.max_age_s, rescore_s=self.options.rescore_s),
            recency=lambda node: node.last_access_time,
            learned=self.learned,
            waits=self.waits,
        )
        self.prefetch: SimulatedPrefetch | None = None
        if self.options.prefetch and base.host_units:
            self.prefetch = SimulatedPrefetch(self.tree, unit_tokens, self.options.aggressive_share)
        self.queue = True  # False leaves the engine's queue out, as it was before
        self._version = 0

    def learn(self, workload: Workload, order: Sequence[OrderedCall], keys: Keys) -> None:
        """Watch other runs first, in the order of their calls: agents, waits and prompts; nothing is cached."""
        if self._memo is not None and self._memo.learned is not None:
            return  # taken over when this driver was made
        called: dict[int, tuple[float, float]] = {}  # when the run's latest call began, and how long it took
        for item in order:
            run = workload.runs[item.run]
            history = run.agents[: item.call + 1]
            if item.run in called:
                began_s, answer_s = called[item.run]
                self.waits.observe(run.workflow, history[-2], item.at_s - began_s, answer_s)
            called[item.run] = item.at_s, item.ends_s - item.at_s
            self.forecasts.heard(run.run_id, run.workflow, history, item.at_s)
            self.forecasts.heard_answer(run.run_id, run.calls[item.call].output_tokens)
            blocks = block_hashes(keys.prompt(item.run, item.call).tolist(), self.learned.block_tokens)
            self.learned.observe(run.workflow, run.run_id, history[-1], history[:-1], blocks)
            if item.last:
                self.forecasts.ended(run.run_id, run.workflow, history)
                self.learned.end(run.run_id)
        if self._memo is not None:
            self._memo.learned = deepcopy((self.learned, self.waits))

    def request(self, rid: str, run_id: str, agent: str, workflow: str, prompt: Any, tail: bool) -> TreeRequest:
        from pbkv_ray.engine.hints import owner_params

        made = TreeRequest(rid, prompt, owner_params(Caller(run_id, workflow, agent, 0)), None, tail)
        if self.queue:
            self.tree.cache.queued(made)
        return made

    def call_started(self, run_id: str, workflow: str, history: Sequence[str], at_s: float) -> None:
        self._publish(run_id, workflow, self.forecasts.started(run_id, workflow, history, at_s), at_s)

    def call_finished(self, run_id: str, workflow: str, history: Sequence[str], tokens: int, at_s: float) -> None:
        self.index.answered(run_id, at_s)
        forecast, began_s = self.forecasts.answered(run_id, workflow, history, tokens)
        if forecast is not None:
            self._publish(run_id, workflow, forecast, began_s)

    def run_ended(self, run_id: str, workflow: str, history: Sequence[str], at_s: float) -> None:
        self.forecasts.ended(run_id, workflow, history)
        self.index.end(run_id, at_s)

    def _publish(self, run_id: str, workflow: str, forecast: Forecast | None, made_s: float) -> None:
        self._version += 1
        self._hear(run_id, workflow, forecast, self._version, made_s)

    def _hear(self, run_id: str, workflow: str, forecast: Forecast | None, version: int, made_s: float) -> None:
        if forecast is None:
            self.index.tick(made_s)
        else:
            self.index.update(run_id, forecast, version=version, at_s=made_s, workflow=workflow)


def _cache() -> type[Any]:
    from pbkv_ray.engine.radix import OwnedRadixCache

    return OwnedRadixCache


def _select(params: Any) -> None:
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
        get_tree_core_factory,
        register_tree_core_backend,
    )

    from pbkv_ray.engine.radix import select
    from pbkv_ray.engine.tree_core import OwnedTreeCore

    if get_tree_core_factory(BACKEND) is None:
        register_tree_core_backend(BACKEND, OwnedTreeCore)
    select(params)


def _tag(cache: Any, request: TreeRequest) -> None:
    """What the plug-in's hook on the scheduler does once a request has joined its first batch."""
    cache.admit(request)
