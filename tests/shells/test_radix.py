"""The plug-in on SGLang's real cache object, its pools and its host tier; no model, no engine."""

import random
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pbkv_ray.core.calls import Caller
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.core.reuse import Tier

pytest.importorskip("sglang")
from pbkv_ray.replay.bare_cache import BareCache

SYSTEM = list(range(1, 9))
TIERS: dict[str, dict[str, Any]] = {
    "device only": {},
    "device only, pages of 4": {"page_size": 4},
    "write_through": {"host_ratio": 2.0},
    "write_through_selective": {"host_ratio": 2.0, "write_policy": "write_through_selective"},
    "write_back": {"host_ratio": 2.0, "write_policy": "write_back"},
    "write_back, pages of 4": {"host_ratio": 2.0, "write_policy": "write_back", "page_size": 4},
}


def caller(run: str, agent: str) -> Caller:
    return Caller(run, "review", agent, 0)


def calls(seed: int, count: int) -> Iterator[tuple[Caller, list[int], list[int]]]:
    """Agents of a dozen runs, each with a context that grows, branches and starts anew."""
    dice, contexts = random.Random(seed), dict[tuple[str, str], list[int]]()
    for _ in range(count):
        who = f"run{dice.randrange(12)}", dice.choice(("planner", "coder", "tester"))
        context = contexts.get(who, SYSTEM)
        if dice.random() < 0.2 or len(context) > 200:
            context = context[: 8 + dice.randrange(6)]
        prompt = [*context, *(dice.randrange(100, 5000) for _ in range(dice.randrange(1, 30)))]
        output = [dice.randrange(100, 5000) for _ in range(dice.randrange(1, 6))]
        contexts[who] = prompt + output
        yield caller(*who), prompt, output


def victims(bare: BareCache) -> list[tuple[str, tuple[int, ...]]]:
    """Records (tier, tokens of the leaf) of everything that is evicted from now on."""
    core, seen = bare.cache.tree_core, list[tuple[str, tuple[int, ...]]]()
    device, host = core.evict_device_leaf, core._evict_host_leaf

    def from_device(node_id: int, *args: Any) -> Any:
        seen.append(("device", tuple(core.node_by_id(node_id).key.token_ids)))
        return device(node_id, *args)

    def from_host(node: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(("host", tuple(node.key.token_ids)))
        return host(node, *args, **kwargs)

    core.evict_device_leaf, core._evict_host_leaf = from_device, from_host
    return seen


def always(agent: str, *, agents: tuple[str, ...] = ("planner", "coder", "tester")) -> Forecast:
    step = np.zeros((3, len(agents) + 1))
    step[:, agents.index(agent)] = 1.0
    return Forecast(agents, step)


def held(bare: BareCache, tokens: list[int]) -> tuple[int, int]:
    """Tokens of the prompt in the device tier, and beyond them in the host tier."""
    from array import array

    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    match = bare.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
    return match.device_prefix_len, match.host_hit_length


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("policy", ["lae", "he", "kvflow", "pbkv+"])
def test_without_forecasts_and_endings_the_victims_are_those_of_lru(policy: str, tiers: dict[str, Any]) -> None:
    stock = BareCache("lru", 1_200, **tiers)
    ours = BareCache(policy, 1_200, partial_tokens=0, **tiers)
    expected, found = victims(stock), victims(ours)
    for who, prompt, output in calls(seed=7, count=150):
        assert ours.call(who, prompt, output) == stock.call(who, prompt, output)
    assert len(expected) > 100
    assert found == expected
    ours.cache.sanity_check()
    ours.index.check_invariants()


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_the_index_keeps_step_with_the_tree(tiers: dict[str, Any]) -> None:
    bare = BareCache("pbkv+", 1_500, partial_tokens=4, **tiers)
    dice = random.Random(3)
    for number, (who, prompt, output) in enumerate(calls(seed=11, count=200)):
        bare.call(who if dice.random() < 0.9 else None, prompt, output)
        agents = ("planner", "coder", "tester")
        step = np.array([[dice.random() + 0.01 for _ in range(4)] for _ in range(3)])
        step /= step.sum(1, keepdims=True)
        bare.index.update(who.run_id, Forecast(agents, step), version=number, at_s=float(number))
        if number % 40 == 39:
            bare.end(f"run{dice.randrange(12)}")
    core = bare.cache.tree_core
    bare.cache.sanity_check()
    bare.index.check_invariants()
    nodes = {node for node in core._node_arena.values() if node is not core.root_node}
    assert set(bare.index._nodes) == nodes
    full = {node: node.component_data[0] for node in nodes}
    assert {n for n in nodes if bare.index._nodes[n].resident[Tier.DEVICE]} == {
        n for n in nodes if full[n].value is not None
    }
    assert {n for n in nodes if bare.index._nodes[n].resident[Tier.HOST]} == {
        n for n in nodes if full[n].host_value is not None
    }
    assert {n for n in nodes if bare.index._nodes[n].ticket[Tier.DEVICE]} == core.evictable_device_leaves
    assert {n for n in nodes if bare.index._nodes[n].ticket[Tier.HOST]} == core.evictable_host_leaves
    assert (core.count.fallbacks, core.count.failures) == (0, 0)
    assert core.count.partial > 0


def test_what_only_ended_runs_own_goes_first_and_what_a_running_one_shares_stays() -> None:
    bare = BareCache("lae", 1_000)
    old, new = [*SYSTEM, *range(100, 150)], [*SYSTEM, *range(200, 250)]
    bare.call(caller("running", "coder"), old)
    bare.call(caller("ended", "coder"), new)
    bare.end("ended")
    bare.evict(1)
    assert held(bare, old) == (58, 0)
    assert held(bare, new) == (8, 0)


def test_the_agent_that_is_forecast_keeps_its_context() -> None:
    bare = BareCache("he", 1_000)
    coder, tester = [*SYSTEM, *range(100, 150)], [*SYSTEM, *range(200, 250)]
    bare.call(caller("run", "coder"), coder)
    bare.call(caller("run", "tester"), tester)
    bare.index.update("run", always("coder"), version=1, at_s=0.0)
    bare.evict(1)
    assert held(bare, coder) == (58, 0)
    assert held(bare, tester) == (8, 0)


def test_the_host_tier_drops_what_only_ended_runs_own_first() -> None:
    bare = BareCache("lae", 1_000, host_ratio=2.0)
    old, new = [*SYSTEM, *range(100, 150)], [*SYSTEM, *range(200, 250)]
    bare.call(caller("running", "coder"), old)
    bare.call(caller("ended", "coder"), new)
    bare.end("ended")
    bare.evict(1_000)
    assert held(bare, old) == (0, 58)
    bare.cache.evict_host(1)
    assert held(bare, new) == (0, 8)
    assert held(bare, old) == (0, 58)


def test_a_branch_inherits_the_owners_of_what_it_splits() -> None:
    bare = BareCache("lae", 1_000)
    bare.call(caller("first", "coder"), [*SYSTEM, *range(100, 150)])
    bare.call(caller("second", "coder"), [*SYSTEM, *range(100, 120), *range(300, 320)])
    core = bare.cache.tree_core
    owners = {
        tuple(node.key.token_ids)[:1]: {run for run, _ in bare.index.explain(node).owners}
        for node in core._node_arena.values()
        if node is not core.root_node
    }
    assert owners == {(1,): {"first", "second"}, (120,): {"first"}, (300,): {"second"}}


def test_of_a_long_leaf_only_a_tail_of_whole_pages_is_freed_and_the_rest_is_as_old_as_before() -> None:
    bare = BareCache("pbkv+", 4_096, page_size=16)
    long, younger = list(range(1_024)), list(range(5_000, 5_064))
    bare.call(caller("run", "coder"), long)
    bare.call(caller("run", "tester"), younger)
    assert bare.evict(3) == 256
    assert held(bare, long) == (768, 0)
    before = bare.cache.tree_core.count.partial
    bare.call(caller("run", "tester"), younger)  # the match made both halves recent; the tester is younger again
    assert bare.evict(600) == 768  # less than 256 would stay: all of it goes
    assert (held(bare, long), held(bare, younger)) == ((0, 0), (64, 0))
    assert (before, bare.cache.tree_core.count.partial) == (1, 1)
    bare.cache.sanity_check()


def test_a_running_request_keeps_its_path_whatever_is_asked_for() -> None:
    bare = BareCache("pbkv+", 1_000)
    prompt = [*SYSTEM, *range(100, 150)]
    request = bare.begin(caller("run", "coder"), prompt)
    bare.call(caller("run", "tester"), [*SYSTEM, *range(200, 250)])
    bare.end("run")
    assert bare.evict(1_000) == 50
    assert held(bare, prompt) == (58, 0)
    bare.finish(request)
    assert bare.evict(1_000) == 58


def test_a_request_that_finishes_after_its_run_does_not_bring_the_run_back() -> None:
    bare = BareCache("lae", 1_000)
    request = bare.begin(caller("ended", "coder"), [*SYSTEM, *range(100, 150)])
    bare.end("ended")
    bare.finish(request, [7, 7, 7])
    assert bare.index.owners.has_ended("ended")
    assert "ended" not in bare.index.owners.runs
    assert bare.index.owners.count.late_calls > 0


def test_the_end_of_a_call_is_heard_and_a_retraction_is_none() -> None:
    from sglang.srt.mem_cache.common import release_kv_cache

    bare = BareCache("pbkv+", 1_000)
    retracted, finished = (bare.begin(caller(run, "coder"), [*SYSTEM, *range(100, 150)]) for run in ("r", "f"))
    bare.index.tick(4.0)
    release_kv_cache(retracted, bare.cache, checkpoint=True)  # as SGLang does when memory is short; it will go on
    bare.finish(finished, [7, 7])
    known = {run: (of.answered_s, of.calling) for run, of in bare.index.owners.runs.items()}
    assert known == {"r": (None, 1), "f": (4.0, 0)}


def test_scores_are_kept_up_to_date_only_while_victims_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    from pbkv_ray.engine.hints import encode
    from pbkv_ray.engine.scheduler import apply_hints
    from pbkv_ray.engine.tree_core import PRESSED

    bare, scored = BareCache("pbkv+", 1_000), list[Tier]()
    scheduler, nothing = SimpleNamespace(tree_cache=bare.cache), encode([], {}, 1.0)
    monkeypatch.setattr(bare.index, "peek", scored.append)
    bare.call(caller("run", "coder"), [*SYSTEM, *range(100, 150)])
    bare.evict(10)
    for _ in range(2 * PRESSED):
        apply_hints(scheduler, nothing)
    assert len(scored) == PRESSED
    bare.evict(10)
    apply_hints(scheduler, nothing)
    assert len(scored) == PRESSED + 1


@pytest.mark.parametrize(("ranks", "method", "through_sglang"), [(1, "ours", 0), (2, "ours", 1), (1, "save_model", 1)])
def test_a_rank_that_is_alone_takes_hints_without_a_barrier(ranks: int, method: str, through_sglang: int) -> None:
    from pbkv_ray.engine.hints import RPC, encode
    from pbkv_ray.engine.scheduler import around_rpc

    bare, passed_on = BareCache("pbkv+", 1_000), list[Any]()
    scheduler = SimpleNamespace(tree_cache=bare.cache, tp_group=SimpleNamespace(world_size=ranks))
    request = SimpleNamespace(
        method=RPC if method == "ours" else method, parameters={"payload": encode([], {"gone": 7.0}, 8.0)}
    )
    reply = around_rpc(lambda _, request: passed_on.append(request), scheduler, request)
    assert len(passed_on) == through_sglang
    assert bare.index.owners.has_ended("gone") == (not through_sglang)
    if not through_sglang:
        assert (reply.success, reply.message) == (True, "")
        request.parameters = {"payload": "no hint"}
        refused = around_rpc(lambda _, request: passed_on.append(request), scheduler, request)
        assert not refused.success
        assert refused.message


def test_a_policy_that_raises_evicts_like_lru_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, ours = BareCache("lru", 1_200, host_ratio=2.0), BareCache("pbkv+", 1_200, partial_tokens=0, host_ratio=2.0)
    expected, found = victims(stock), victims(ours)

    def broken(tier: int) -> None:
        raise ZeroDivisionError("a bad policy")

    monkeypatch.setattr(ours.index.owners, "rescore", lambda: broken(0))
    for who, prompt, output in calls(seed=5, count=100):
        assert ours.call(who, prompt, output) == stock.call(who, prompt, output)
    assert found == expected
    assert ours.cache.tree_core.count.fallbacks > 10
    ours.cache.sanity_check()


def test_an_index_that_missed_something_is_given_up_until_the_cache_is_flushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = BareCache("pbkv+", 1_200)
    with monkeypatch.context() as patch:
        patch.setattr(bare.index, "add", lambda *_: 1 / 0)
        bare.call(caller("run", "coder"), [*SYSTEM, *range(100, 150)])
    core = bare.cache.tree_core
    assert (core.trusted, core.count.failures) == (False, 1)
    assert bare.evict(1_000) == 58
    bare.cache.reset()
    assert core.trusted
    bare.allocator.clear()
    bare.call(caller("run", "coder"), [*SYSTEM, *range(100, 150)])
    assert len(bare.index) == 1
    bare.index.check_invariants()


VICTIMS = """
import sys; sys.path.insert(0, {root!r})
import hashlib, json
from tests.shells.test_radix import BareCache, calls, victims, always
bare = BareCache("pbkv+", 1_200, host_ratio=2.0, partial_tokens=16)
seen = victims(bare)
for number, (who, prompt, output) in enumerate(calls(seed=23, count=120)):
    bare.call(who, prompt, output)
    bare.index.update(who.run_id, always("coder"), version=number, at_s=number * 0.7)
    if number % 17 == 16:
        bare.end(who.run_id, number * 0.7)
print(len(seen), hashlib.sha256(json.dumps(seen).encode()).hexdigest())
"""


def test_two_processes_with_one_event_log_choose_the_same_victims(pytestconfig: pytest.Config) -> None:
    code = VICTIMS.format(root=str(pytestconfig.rootpath))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env={**__import__("os").environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    first, second = (rank.communicate(timeout=300)[0].splitlines()[-1] for rank in ranks)
    assert first == second
    assert int(first.split()[0]) > 50
