"""A policy against the shadow of LRU: who is in charge, and what a bad policy may cost in all."""

from itertools import pairwise

import pytest

from pbkv_ray.core.guard import Guard, GuardOptions
from pbkv_ray.errors import ConfigError

POOL = 1_000
OPTIONS = GuardOptions(allowance=0.01, limit=0.5, rest=4.0, most_rest=16.0)


def serve(guard: Guard, tokens: int, hit: float, lru: float, call: int = 100) -> list[tuple[int, str]]:
    """Calls of 100 tokens at these hit rates. Returns (tokens served so far, mode) at each change."""
    changes = []
    for _ in range(tokens // call):
        if guard.served(call, round(hit * call), round(lru * call)):
            changes.append((guard.count.prompt, guard.mode))
    return changes


def test_a_policy_that_is_as_good_as_lru_stays_in_charge() -> None:
    guard = Guard(POOL, OPTIONS)
    assert serve(guard, 100_000, hit=0.5, lru=0.5) == []
    assert serve(guard, 100_000, hit=0.5, lru=0.51) == []  # within the allowance
    assert (guard.mode, guard.debt, guard.count.fallbacks) == ("policy", pytest.approx(0.0, abs=1e-6), 0)


def test_a_large_loss_is_seen_soon_and_a_small_one_late() -> None:
    assert serve(Guard(POOL, OPTIONS), 1_400, hit=0.0, lru=0.5) == [(1_100, "fallback")]
    assert serve(Guard(POOL, OPTIONS), 17_000, hit=0.45, lru=0.5) == [(12_600, "fallback"), (16_600, "policy")]


def test_gains_of_before_buy_no_losses() -> None:
    guard = Guard(POOL, OPTIONS)
    assert serve(guard, 50_000, hit=0.9, lru=0.1) == []
    assert serve(guard, 1_100, hit=0.0, lru=0.5) == [(51_100, "fallback")]


def test_it_rests_twice_as_long_each_time_and_no_longer_than_it_may() -> None:
    guard = Guard(POOL, OPTIONS)
    changes: list[tuple[int, str]] = []
    while len(changes) < 8:  # the policy never learns; LRU is what the shadow says
        hit = 0.5 if guard.mode == "fallback" else 0.0
        changes += serve(guard, 100, hit=hit, lru=0.5)
    rests = [later - earlier for (earlier, mode), (later, _) in pairwise(changes) if mode == "fallback"]
    assert rests == [4_000, 8_000, 16_000, 16_000]


def test_a_policy_that_does_well_for_as_long_as_it_rested_is_trusted_as_at_first() -> None:
    guard = Guard(POOL, OPTIONS)
    serve(guard, 1_100, hit=0.0, lru=0.5)
    serve(guard, 4_000, hit=0.5, lru=0.5)
    assert guard.mode == "policy"
    serve(guard, 8_100, hit=0.6, lru=0.5)
    serve(guard, 1_100, hit=0.0, lru=0.5)
    assert (guard.mode, guard.rest_tokens) == ("fallback", 4_000)


def test_what_the_shadow_says_too_many_while_lru_is_in_charge_is_taken_off_later() -> None:
    guard = Guard(POOL, OPTIONS)
    assert serve(guard, 28_000, hit=0.47, lru=0.5) == [(25_100, "fallback")]  # the engine's own LRU hits .47, too
    serve(guard, 10_000, hit=0.47, lru=0.5)
    assert guard.error == pytest.approx(0.03)
    assert serve(guard, 100_000, hit=0.47, lru=0.5) == []


def test_what_lru_misses_right_after_it_took_over_is_not_the_shadows_error() -> None:
    guard = Guard(POOL, OPTIONS)
    serve(guard, 1_100, hit=0.0, lru=0.5)
    serve(guard, 2_000, hit=0.1, lru=0.5)  # the tier still holds what the policy liked
    serve(guard, 2_000, hit=0.5, lru=0.5)
    assert (guard.mode, guard.error) == ("policy", 0.0)


def test_a_policy_that_never_hits_costs_little_in_all() -> None:
    guard = Guard(POOL, GuardOptions())
    for _ in range(20_000):
        lru = 50
        guard.served(100, lru if guard.mode == "fallback" else 0, lru)
    count = guard.count
    assert count.fallbacks <= 12
    assert (count.lru - count.hit) / count.prompt < 0.005


def test_an_operator_who_takes_over_starts_it_anew() -> None:
    guard = Guard(POOL, OPTIONS)
    serve(guard, 1_100, hit=0.0, lru=0.5)
    guard.reset()
    assert (guard.mode, guard.debt, guard.rest_tokens) == ("policy", 0.0, 0)
    assert guard.count.fallbacks == 1


@pytest.mark.parametrize("wrong", [{"allowance": -0.1}, {"limit": 0.0}, {"rest": 0.0}, {"rest": 2.0, "most_rest": 1.0}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="a guard needs"):
        GuardOptions(**wrong)
