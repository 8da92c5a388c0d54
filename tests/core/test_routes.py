"""The routing table told as stories: where runs live while reports, calls, moves, losses and restarts come in."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.core.places import Place
from pbkv_ray.core.routes import Routes
from pbkv_ray.core.routing import Held, RoutingOptions

OPTIONS = RoutingOptions(prefill_tokens_s=1_000.0, move_s=0.1, move_share=0.2, crowd=0.25)


def table(*replicas: str, options: RoutingOptions = OPTIONS) -> Routes:
    routes = Routes(options)
    for replica in replicas:
        routes.report(replica, "epoch-1", {}, 0, at_s=0.0, prefill_tokens_s=1_000.0)
    return routes


def routed(routes: Routes, run: str, tokens: int, at_s: float, among: list[str] | None = None) -> tuple[str, str]:
    made = routes.route(run, tokens, at_s, among)
    assert made is not None
    return made.replica, made.reason


def test_new_runs_spread_and_their_calls_stay_at_home():
    routes = table("a", "b", "c")
    assert [routed(routes, f"r{n}", 2_000, 100.0 * n) for n in range(6)] == [
        (home, "placed") for home in ("a", "b", "c", "a", "b", "c")
    ]
    assert [routed(routes, f"r{n}", 2_500, 700.0 + n) for n in range(6)] == [
        (home, "home") for home in ("a", "b", "c", "a", "b", "c")
    ]


def test_new_runs_spread_whatever_rates_the_replicas_happened_to_measure():
    """One had a long prompt, one the few tokens of a warm-up, one nothing yet."""
    routes = table()
    for replica, rate in ("a", 9_000.0), ("b", 60.0), ("c", 0.0):
        routes.report(replica, "epoch-1", {}, 0, at_s=0.0, prefill_tokens_s=rate)
    assert [routed(routes, f"r{n}", 2_000, 100.0 * n)[0] for n in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_a_run_whose_home_is_overloaded_moves_once_and_its_new_home_is_remembered():
    routes = table("a", "b")
    assert routed(routes, "r", 2_000, 1.0) == ("a", "placed")
    routes.report("a", "epoch-1", {"r": (2_000, 0)}, 9_000, at_s=5.0, prefill_tokens_s=1_000.0)
    assert routed(routes, "r", 2_200, 5.0) == ("b", "moved")
    assert routed(routes, "r", 2_400, 5.1) == ("b", "home")
    # The old home has become idle and still holds the context; what was sent to the new one is as good as there.
    routes.report("a", "epoch-1", {"r": (2_000, 0)}, 0, at_s=8.0, prefill_tokens_s=1_000.0)
    routes.report("b", "epoch-1", {"r": (2_400, 0)}, 0, at_s=8.0, prefill_tokens_s=1_000.0)
    assert routed(routes, "r", 2_600, 9.0) == ("b", "home")


def test_siblings_follow_the_first_into_its_cold_prefix_and_spread_when_it_is_too_crowded():
    routes = table("a", "b", "c")
    for n in range(8):
        routes.started(f"sibling-{n}", "lead")
    places = [routed(routes, f"sibling-{n}", 4_000, 1.0 + n / 1_000) for n in range(8)]
    assert places == [("a", "placed"), *[("a", "family")] * 7]
    # Warm prefix, long queue: now the copy elsewhere is cheaper than the wait.
    routes.report("a", "epoch-1", {f"sibling-{n}": (4_000, 0) for n in range(8)}, 20_000, 9.0, 1_000.0)
    routes.started("late", "lead")
    assert routed(routes, "late", 4_000, 9.0) == ("b", "placed")


def test_calls_of_one_run_at_the_same_moment_share_its_home():
    routes = table("a", "b", "c")
    assert [routed(routes, "run", 4_000, 1.0) for _ in range(8)] == [("a", "placed"), *[("a", "home")] * 7]


def test_a_replica_that_leaves_is_forgotten_and_its_runs_find_new_homes():
    routes = table("a", "b")
    routed(routes, "r", 2_000, 1.0)
    routes.report("a", "epoch-1", {"r": (2_000, 0)}, 0, 2.0)
    routes.left("a")
    assert routes.get("r") == Place(home=None, held={}, expected=routes.get("r").expected)  # type: ignore[union-attr]
    assert routed(routes, "r", 2_100, 3.0) == ("b", "placed")


def test_a_draining_replica_gets_no_new_runs_and_loses_those_it_has():
    routes = table("a", "b")
    assert routed(routes, "old", 2_000, 1.0) == ("a", "placed")
    routes.drain("a")
    assert routed(routes, "new", 2_000, 2.0) == ("b", "placed")
    assert routed(routes, "old", 2_100, 3.0) == ("b", "drained")


def test_an_engine_that_came_back_is_credited_with_nothing():
    routes = table("a", "b")
    routed(routes, "r", 2_000, 1.0)
    routes.report("a", "epoch-1", {"r": (2_000, 0)}, 0, 2.0)
    routes.joined("a", "epoch-2")
    place = routes.get("r")
    assert place is not None
    assert (place.home, place.held) == ("a", {})
    made = routes.route("r", 2_100, 2.5)
    assert made is not None
    assert made.tokens == 2_100


def test_a_table_that_starts_empty_learns_homes_from_reports():
    routes = table("a", "b")
    routes.report("b", "epoch-1", {"r": (3_000, 500)}, 500, 1.0)
    assert "r" not in routes  # an ended run's leftovers are no run
    assert routed(routes, "r", 4_000, 2.0) == ("b", "placed")
    assert routes.get("r").held == {"b": Held(3_000, 500)}  # type: ignore[union-attr]


def test_what_a_run_brings_anew_counts_wherever_it_goes():
    """Its calls share little with each other: home is worth little to it."""
    routes = table("a", "b")
    routed(routes, "r", 4_000, 1.0)
    for cached in (0, 1_000, 1_200):
        routes.finished("r", "a", 4_000, cached)
    place = routes.get("r")
    assert place is not None
    assert (place.recent, place.fresh, place.expected) == ((3_000, 2_800), 2_800, 2_900.0)
    routes.report("a", "epoch-1", {"r": (30_000, 0)}, 2_000, 30.0, 1_000.0)
    assert routed(routes, "r", 4_000, 30.0) == ("a", "home")
    routes.report("a", "epoch-1", {"r": (30_000, 0)}, 3_000, 60.0, 1_000.0)
    assert routed(routes, "r", 4_000, 60.0) == ("b", "moved")


def test_a_copy_follows_and_keeps_its_own_choice_until_the_controller_can_have_heard_of_it():
    controller, copy = table("a", "b"), Routes(OPTIONS)
    routed(controller, "r", 2_000, 1.0)
    routed(controller, "gone", 2_000, 1.0)
    first = controller.changes(-1)
    copy.apply(first, 100.0)
    assert (first.full, copy.get("r")) == (True, controller.get("r"))
    # The copy moves the run; the controller still speaks of the old home.
    controller.report("a", "epoch-1", {"r": (2_000, 0)}, 9_000, 2.0, 1_000.0)
    controller.ended("gone")
    second = controller.changes(first.version)
    assert (second.full, set(second.places)) == (False, {"r", "gone"})
    copy.apply(second, 101.0)
    assert "gone" not in copy
    assert routed(copy, "r", 2_200, 101.0) == ("b", "moved")
    copy.apply(second, 102.0)
    assert copy.get("r").home == "b"  # type: ignore[union-attr]
    controller.settled("r", "b")
    copy.apply(controller.changes(second.version), 200.0)
    assert copy.get("r").home == "b"  # type: ignore[union-attr]
    copy.check_invariants()


def test_a_controller_that_restarted_takes_nothing_from_a_copy():
    copy = table("a", "b")
    routed(copy, "r", 2_000, 1.0)
    fresh = Routes(OPTIONS)
    fresh.joined("a", "epoch-1")
    fresh.started("r", None)
    copy.apply(fresh.changes(-1), 2.0, merge=True)
    assert (sorted(copy.replicas), routed(copy, "r", 2_100, 3.0)) == (["a", "b"], ("a", "home"))


def test_ids_of_clients_stay_within_bounds():
    routes = table("a", "b", options=RoutingOptions(max_runs=100, max_replicas=2))
    for n in range(100_000):
        routes.started(f"{n}-\u2603", f"parent-{n}")
    for n in range(1_000):
        routes.route(f"{n}-call", 100, float(n))
    for n in range(50):
        routes.joined(f"replica-{n}", "epoch")
    routes.check_invariants()
    assert (len(routes), len(routes.replicas)) == (100, 2)
    assert routes.counts["places_displaced"] == 101_000 - 100


RUNS = st.sampled_from(["r1", "r2", "r3", "r4"])
REPLICAS = st.sampled_from(["a", "b", "c"])
COUNT = st.integers(0, 20_000)
STEPS = st.one_of(
    st.tuples(st.just("route"), RUNS, st.integers(1, 20_000)),
    st.tuples(st.just("started"), RUNS, st.none() | RUNS),
    st.tuples(st.just("finished"), RUNS, REPLICAS, COUNT, COUNT),
    st.tuples(st.just("ended"), RUNS),
    st.tuples(st.just("settled"), RUNS, REPLICAS),
    st.tuples(st.just("left"), REPLICAS),
    st.tuples(st.just("drain"), REPLICAS),
    st.tuples(
        st.just("report"), REPLICAS, st.sampled_from("12"), st.dictionaries(RUNS, st.tuples(COUNT, COUNT)), COUNT
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_whatever_happens_a_copy_that_keeps_up_agrees_with_the_table(steps):
    routes, copy = Routes(RoutingOptions(max_runs=3)), Routes(RoutingOptions(max_runs=3))
    known = -1
    for at_s, (what, *arguments) in enumerate(steps):
        if what == "route":
            made = routes.route(*arguments, float(at_s))
            assert (made is None) == (not routes.replicas)
            assert made is None or made.replica in routes.replicas
        elif what == "report":
            routes.report(*arguments, float(at_s))
        else:
            getattr(routes, what)(*arguments)
        changes = routes.changes(known)
        copy.apply(changes, float(at_s))
        known = changes.version
        routes.check_invariants()
        copy.check_invariants()
        assert {run: copy.get(run) for run in ("r1", "r2", "r3", "r4")} == {
            run: routes.get(run) for run in ("r1", "r2", "r3", "r4")
        }
