"""What an engine may say of how it follows its hints."""

from pbkv_ray.core.health import Following, Health


def test_a_replica_is_exact_while_its_hints_are_fresh():
    health = Health(by_score=True)
    assert health.following(0.0) is Following.FALLBACK, "nobody has told it anything yet"
    health.heard(1.0)
    assert [health.following(now_s) for now_s in (1.0, 16.0, 17.0, 601.0, 602.0)] == [
        Following.EXACT,
        Following.EXACT,
        Following.DEGRADED,
        Following.DEGRADED,
        Following.FALLBACK,
    ]
    health.heard(603.0)
    assert health.following(604.0) is Following.EXACT


def test_a_policy_that_has_failed_is_degraded_for_a_while_and_one_that_is_given_up_is_lru():
    health = Health(by_score=True)
    for now_s in (0.0, 1_000.0):
        health.heard(now_s)
    health.told(1, True, 1_000.0)
    assert health.following(1_001.0) is Following.DEGRADED
    health.told(1, True, 1_500.0)  # the same failure, told again
    health.heard(1_600.0)
    assert health.following(1_601.0) is Following.EXACT
    health.told(2, False, 1_602.0)
    assert health.following(1_603.0) is Following.FALLBACK
    health.told(2, True, 1_604.0)  # the cache was flushed
    assert health.following(1_605.0) is Following.DEGRADED


def test_lru_by_choice_or_by_order_is_lru():
    stock, ordered = Health(by_score=False), Health(by_score=True)
    for health in (stock, ordered):
        health.heard(0.0)
    assert stock.following(1.0) is Following.FALLBACK
    assert ordered.following(1.0, lru_in_charge=True) is Following.FALLBACK
