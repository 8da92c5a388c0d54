"""LRU's shadow, its guard and the operator's switch, on SGLang's real cache object; no model, no engine."""

import random
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pbkv_ray.core.calls import Caller
from pbkv_ray.core.forecast import Forecast

pytest.importorskip("sglang")
from pbkv_ray.engine.hints import order
from pbkv_ray.replay.bare_cache import BareCache
from tests.shells.test_radix import SYSTEM, always, held, victims
from tests.shells.test_radix import calls as random_calls

POOL = 6_000
AGENTS = ("coder", "tester")


def calls(count: int) -> Iterator[tuple[Caller, list[int]]]:
    """Six runs at a time whose agents take long turns: what was used last is what is used next."""
    dice, contexts = random.Random(5), dict[tuple[int, str], list[int]]()
    turns = {slot: [0, dice.randrange(2)] for slot in range(6)}
    for number in range(count):
        slot = dice.randrange(6)
        turn = turns[slot]
        if turn[0] == 0:
            turn[:] = [dice.randrange(8, 16), 1 - turn[1]]
        turn[0] -= 1
        agent = AGENTS[turn[1]]
        context = contexts.setdefault((slot, agent), list(range(10_000 * slot, 10_000 * slot + 400)))
        if len(context) > 1_600:
            context = contexts[slot, agent] = [10_000 * slot + number, *context[1:400]]
        context += [100_000 + number] * dice.randrange(40, 120)
        yield Caller(f"run{slot}", "review", agent, number), list(context)


def serve(bare: BareCache, count: int = 300) -> float:
    """The hit rate; every forecast says that the other agent calls."""
    hit = asked = 0
    for number, (who, prompt) in enumerate(calls(count)):
        wrong = AGENTS[who.agent == "coder"]
        if hasattr(bare.cache, "admit"):
            bare.index.update(who.run_id, always(wrong, agents=AGENTS), version=number, at_s=float(number))
        hit += bare.call(who, prompt, [7, number]).device
        asked += len(prompt)
    return hit / asked


def test_a_policy_that_is_misled_falls_back_and_costs_three_points_at_most() -> None:
    lru, misled = serve(BareCache("lru", POOL)), serve(BareCache("he", POOL))
    guarded = BareCache("he", POOL, shadow="guard")
    hit, said = serve(guarded), guarded.cache.oversight.report()
    assert misled < lru - 0.1
    assert hit > lru - 0.03
    assert (said["fallbacks"] in (1, 2), said["failures"]) == (True, 0)
    assert said["lru"] / said["prompt"] == pytest.approx(lru, abs=0.02)
    assert said["hit"] / said["prompt"] == pytest.approx(hit, abs=1e-3)
    guarded.cache.sanity_check()
    guarded.index.check_invariants()


@pytest.mark.parametrize("salt", ["", *(f"tenant {i}" for i in range(12))])
def test_tenants_of_any_salt_are_shadowed_in_a_pool_so_large_that_it_is_sampled(salt: str) -> None:
    from pbkv_ray.engine.oversight import Oversight

    made, prompt = Oversight(1 << 20, 16, shadow=True, guards=True), list(range(4_000))
    req = SimpleNamespace(
        extra_key=None, cache_salt=salt, origin_input_ids=prompt, full_untruncated_fill_ids=array("q", prompt)
    )
    for _ in range(2):
        made.admitted(req, 0)
        made.stored(req, len(prompt))
    said = made.report()
    assert (said["watches"], said["failures"], said["prompt"]) == (True, 0, 8_000)
    assert said["lru"] > 3_000


def test_one_that_only_watches_says_so_and_leaves_the_policy_in_charge() -> None:
    watched, alone = BareCache("he", POOL, shadow="watch"), BareCache("he", POOL)
    assert serve(watched, 100) == serve(alone, 100)
    said = watched.cache.oversight.report()
    assert (said["state"], said["watches"]) == ("policy", True)
    assert said["lru"] > said["hit"]


@pytest.mark.parametrize("policy", ["lae", "pbkv+"])
def test_by_order_of_an_operator_the_victims_are_those_of_lru_whatever_is_forecast(policy: str) -> None:
    from pbkv_ray.engine.scheduler import apply_hints  # imports SGLang, which needs its platform first

    stock, ours = BareCache("lru", 1_200, host_ratio=2.0), BareCache(policy, 1_200, host_ratio=2.0)
    apply_hints(SimpleNamespace(tree_cache=ours.cache), order("lru"))  # as the scheduler hears it
    expected, found = victims(stock), victims(ours)
    for number, (who, prompt, output) in enumerate(random_calls(seed=7, count=150)):
        ours.index.update(who.run_id, always("tester"), version=number, at_s=float(number))
        assert ours.call(who, prompt, output) == stock.call(who, prompt, output)
        if number % 30 == 29:
            ours.end(who.run_id)
    assert len(expected) > 50
    assert found == expected
    ours.cache.sanity_check()
    ours.index.check_invariants()


def test_switched_back_the_policy_knows_what_the_cache_holds() -> None:
    bare = BareCache("he", 1_000)
    coder, tester = [*SYSTEM, *range(100, 150)], [*SYSTEM, *range(200, 250)]
    bare.cache.switch("lru")
    bare.call(Caller("run", "review", "coder", 0), coder)
    bare.call(Caller("run", "review", "tester", 0), tester)
    bare.cache.switch("he")
    bare.index.update("run", always("coder"), version=1, at_s=0.0)
    bare.evict(1)
    assert (held(bare, coder), held(bare, tester)) == ((58, 0), (8, 0))


def test_switched_to_a_third_policy_the_cache_keeps_what_it_holds_and_learns_who_owns_it_from_the_next_calls() -> None:
    bare = BareCache("lae", 1_000)
    coder, tester = [*SYSTEM, *range(100, 150)], [*SYSTEM, *range(200, 250)]
    bare.call(Caller("run", "review", "coder", 0), coder)
    bare.call(Caller("run", "review", "tester", 0), tester)
    bare.cache.switch("he")
    bare.index.check_invariants()
    assert bare.cache.tree_core.options.policy == "he"
    assert (held(bare, coder), held(bare, tester)) == ((58, 0), (58, 0))
    bare.call(Caller("run", "review", "coder", 1), coder)
    bare.call(Caller("run", "review", "tester", 1), tester)
    step = np.array([[1.0, 0.0, 0.0]] * 3)
    bare.index.update("run", Forecast(AGENTS, step), version=2, at_s=0.0)
    bare.evict(2)  # the last token of a prompt that came twice is a node of its own
    assert (held(bare, coder), held(bare, tester)) == ((58, 0), (8, 0))


def test_a_shadow_that_raises_is_off_and_the_policy_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, sound = BareCache("he", POOL, shadow="guard"), BareCache("he", POOL)

    def fail(*_: Any) -> int:
        raise ZeroDivisionError("a bad shadow")

    monkeypatch.setattr("pbkv_ray.core.shadow.ShadowLru.find", fail)
    assert serve(broken, 60) == serve(sound, 60)
    said = broken.cache.oversight.report()
    assert (said["state"], said["watches"], said["failures"]) == ("policy", False, 1)
