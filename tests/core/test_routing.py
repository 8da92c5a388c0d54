"""Which replica takes a call: the costs of one decision, and what must hold for all of them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.core.routing import CallSize, Cost, Decision, Held, ReplicaFacts, RoutingOptions, cost_of, decide
from pbkv_ray.errors import ConfigError

OPTIONS = RoutingOptions(prefill_tokens_s=1_000.0, load_tokens_s=10_000.0, move_s=0.1, move_share=0.2, crowd=0.5)
IDLE = ReplicaFacts()
many = settings(max_examples=60, deadline=None)


def test_a_decision_keeps_every_term_of_every_replica():
    size = CallSize(prompt=4_000, fresh=500)
    replicas = {
        "a": ReplicaFacts(queued_tokens=2_000, expected_tokens=3_000),
        "b": ReplicaFacts(prefill_tokens_s=2_000, load_tokens_s=5_000, expected_tokens=100),
    }
    held = {"a": Held(device=3_000, host=500)}
    assert decide(size, replicas, held, OPTIONS, home="a", own_tokens=1_000) == Decision(
        "b",
        "moved",
        4_000,
        (Cost("b", 2.0, 0.0, 0.0, 0.025), Cost("a", 0.5, 0.05, 2.0, 1.0)),
    )


def test_a_run_stays_at_home_unless_a_move_saves_enough():
    size, held = CallSize(1_000), {"a": Held(device=900)}

    def choose(queued: float) -> tuple[str, str]:
        made = decide(size, {"a": ReplicaFacts(queued), "b": IDLE}, held, OPTIONS, home="a")
        assert made is not None
        return made.replica, made.reason

    # Staying costs 0.1 s and the queue, moving 1 s: it pays from a queue of 1,150 tokens on (a fifth of 1.25 s).
    assert [choose(queued) for queued in (0, 900, 1_100, 1_200)] == [("a", "home")] * 3 + [("b", "moved")]


def test_a_run_without_a_home_goes_with_its_family_while_that_is_no_dearer_than_a_move():
    busy = {"a": ReplicaFacts(2_000), "b": IDLE}
    cold, warm = CallSize(4_000), {"a": Held(device=4_000)}
    assert [
        (made.replica, made.reason)
        for made in (
            decide(cold, busy, {}, OPTIONS),
            decide(cold, busy, warm, OPTIONS, family="a"),
            decide(cold, {**busy, "a": ReplicaFacts(9_000)}, warm, OPTIONS, family="a"),
        )
        if made is not None
    ] == [("b", "placed"), ("a", "family"), ("b", "placed")]


def test_a_home_that_is_gone_or_drains_is_left():
    size, held = CallSize(100), {"a": Held(device=100)}
    draining = ReplicaFacts(draining=True)
    made = [
        decide(size, {"b": IDLE}, held, OPTIONS, home="a"),
        decide(size, {"a": draining, "b": IDLE}, held, OPTIONS, home="a"),
        decide(size, {"a": draining, "b": ReplicaFacts(9_999)}, held, OPTIONS),
        decide(size, {"a": draining}, held, OPTIONS, home="a"),  # better than nothing
        decide(size, {}, held, OPTIONS, home="a"),
    ]
    assert [made and (made.replica, made.reason) for made in made] == [
        ("b", "left"),
        ("b", "drained"),
        ("b", "placed"),
        ("a", "home"),
        None,
    ]


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="rates and bounds must be above zero"):
        RoutingOptions(prefill_tokens_s=0)
    with pytest.raises(ConfigError, match="must not be negative"):
        RoutingOptions(move_s=-1)


NAMES = st.sampled_from("abcdef")
TOKENS = st.integers(0, 50_000)
FACTS = st.builds(ReplicaFacts, TOKENS, TOKENS, st.sampled_from([0, 500.0, 8_000.0]), st.just(0), st.booleans())
HELD = st.builds(Held, TOKENS, TOKENS)
SIZES = st.builds(CallSize, st.integers(1, 50_000), TOKENS)
REPLICAS = st.dictionaries(NAMES, FACTS, min_size=1)


@many
@given(SIZES, REPLICAS, st.dictionaries(NAMES, HELD), st.none() | NAMES, st.none() | NAMES)
def test_the_choice_is_always_a_replica_that_is_there(size, replicas, held, home, family):
    made = decide(size, replicas, held, OPTIONS, home=home, family=family)
    assert made is not None
    assert made.replica in replicas
    assert {cost.replica for cost in made.costs} == replicas.keys()
    assert all(min(cost.compute_s, cost.load_s, cost.queue_s, cost.crowd_s) >= 0 for cost in made.costs)
    assert list(made.costs) == sorted(made.costs, key=lambda cost: (cost.total_s, cost.replica))
    if any(not facts.draining for facts in replicas.values()):
        assert not replicas[made.replica].draining
    if (home or family) not in replicas:
        open_ = [cost.replica for cost in made.costs if not replicas[cost.replica].draining]
        assert made.replica == (open_ or [made.costs[0].replica])[0]


@many
@given(SIZES, FACTS, HELD, st.integers(1, 10_000))
def test_costs_are_monotone(size, facts, held, more):
    def total(size=size, held=held, facts=facts) -> float:
        return cost_of("a", size, held, facts, OPTIONS).total_s

    least = total() - 1e-9
    assert total(facts=replace(facts, queued_tokens=facts.queued_tokens + more)) > least
    assert total(facts=replace(facts, expected_tokens=facts.expected_tokens + more)) > least
    assert total(size=replace(size, prompt=size.prompt + more)) >= least
    assert total(held=replace(held, device=held.device + more)) <= total() + 1e-9
    # A copy in the host tier is cheaper than computing, and dearer than one on the device.
    assert total(held=Held(held.device, held.host + more)) <= total() + 1e-9
    assert total(held=Held(held.device + more, held.host)) <= total(held=Held(held.device, held.host + more)) + 1e-9


@many
@given(SIZES, REPLICAS, st.dictionaries(NAMES, HELD), st.none() | NAMES)
def test_a_run_that_has_moved_stays_where_it_is(size, replicas, held, home):
    """The same facts never make a run move twice: no ping-pong."""
    first = decide(size, replicas, held, OPTIONS, home=home)
    assert first is not None
    second = decide(size, replicas, held, OPTIONS, home=first.replica)
    assert second is not None
    assert (second.replica, second.reason) == (first.replica, "home")


@many
@given(st.integers(1, 50_000), st.lists(NAMES, min_size=1, unique=True))
def test_ties_go_to_the_lower_id(prompt, names):
    made = decide(CallSize(prompt), dict.fromkeys(names, IDLE), {}, OPTIONS)
    assert made is not None
    assert [cost.replica for cost in made.costs] == sorted(names)
    assert made.replica == min(names)


@many
@given(SIZES, REPLICAS, st.dictionaries(NAMES, HELD), NAMES, FACTS)
def test_who_leaves_home_gains_more_than_the_margin(size, replicas, held, home, at_home):
    replicas = {name: replace(facts, draining=False) for name, facts in {**replicas, home: at_home}.items()}
    made = decide(size, replicas, held, OPTIONS, home=home)
    assert made is not None
    total = {cost.replica: cost.total_s for cost in made.costs}
    if made.replica != home:
        assert total[home] - total[made.replica] > max(OPTIONS.move_s, OPTIONS.move_share * total[home])
