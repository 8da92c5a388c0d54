"""Variable-order counts: what they learn from runs, what they say before, and what bounds them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.errors import ConfigError
from pbkv_ray.predict.counts import CountsOptions, VariableOrderCounts
from pbkv_ray.predict.prior import first_agents, propagate


def learn(counts: VariableOrderCounts, *runs: str, workflow: str = "swe") -> None:
    """Each run is a word, each letter an agent."""
    for run in runs:
        for i in range(len(run)):
            counts.observe(workflow, list(run[:i]), run[i])
        counts.observe(workflow, list(run), None)


def likeliest(counts: VariableOrderCounts, history: str, horizon: int = 10) -> str:
    forecast = counts.forecast("swe", list(history), horizon)
    assert forecast is not None
    names = [*forecast.agents, "."]
    return "".join(names[i] for i in forecast.step.argmax(1))


def test_nothing_is_forecast_for_an_unknown_workflow() -> None:
    counts = VariableOrderCounts()
    learn(counts, "ab")
    assert counts.forecast("hover", ["a"], 3) is None


def test_a_repeated_path_is_forecast_to_its_end() -> None:
    counts = VariableOrderCounts()
    learn(counts, *["pctca"] * 20)
    assert likeliest(counts, "", 6) == "pctca."
    assert likeliest(counts, "pct", 3) == "ca."


def test_a_longer_context_decides_where_a_shorter_one_cannot() -> None:
    """After `b` comes what came before it: order 1 sees a coin toss, order 2 certainty."""
    counts = VariableOrderCounts()
    learn(counts, *["xbx", "yby"] * 20)
    assert likeliest(counts, "xb", 1) == "x"
    assert likeliest(counts, "yb", 1) == "y"


def test_end_is_a_hazard_given_survival() -> None:
    """Half of the runs end after `a`; those that do not always call `b`, then end. Survival is not in step 2."""
    counts = VariableOrderCounts(CountsOptions(strength=(1e-9, 1e-9), visits=0))
    learn(counts, *["a", "ab"] * 50)
    forecast = counts.forecast("swe", ["a"], 2)
    assert forecast is not None
    assert forecast.agents == ("a", "b")
    np.testing.assert_allclose(forecast.step, [[0, 0.5, 0.5], [0, 0, 1]], atol=1e-5)
    np.testing.assert_allclose(forecast.mass(), [[0, 0.5], [0, 0]], atol=1e-5)


def test_the_graph_speaks_before_the_first_run_and_yields_to_what_runs_do() -> None:
    counts = VariableOrderCounts()
    edges = [("__start__", "p"), ("p", "c"), ("c", "route"), ("route", "p"), ("route", "__end__")]
    counts.prior("swe", ["p", "c"], edges)
    assert likeliest(counts, "", 2) == "pc"
    forecast = counts.forecast("swe", ["c"], 1)
    assert forecast is not None
    np.testing.assert_allclose(forecast.step, [[0.45 + 0.1 / 3, 0.1 / 3, 0.45 + 0.1 / 3]], rtol=1e-5)
    learn(counts, *["pcpcpc"] * 20)
    assert likeliest(counts, "pc", 1) == "p"
    assert likeliest(counts, "pcpcpc", 1) == "."


def test_an_agent_that_appears_later_is_learned_without_losing_the_rest() -> None:
    counts = VariableOrderCounts()
    learn(counts, *["ab"] * 30)
    agents = "acdefghijklm"  # more than the columns that are there at first
    learn(counts, *[agents] * 30)
    assert likeliest(counts, "acd", 10) == agents[3:] + "."
    assert likeliest(counts, "ab", 1) == "."


def test_contexts_are_bounded_and_old_ones_fade() -> None:
    counts = VariableOrderCounts(CountsOptions(max_contexts=100))
    generator = np.random.default_rng(0)
    learn(counts, *["abc"] * 30)
    for _ in range(300):
        learn(counts, "".join(generator.choice(list("abcdef"), 12)))
    assert counts.dropped["contexts"] > 0
    workflow = counts._workflows["swe"]
    assert len(workflow.rows) <= 100
    learn(counts, *["fed"] * 60)
    assert likeliest(counts, "f", 3) == "ed."


def test_workflows_and_agents_are_bounded() -> None:
    counts = VariableOrderCounts(CountsOptions(max_workflows=2, max_agents=2))
    learn(counts, "ab", workflow="one")
    learn(counts, "ab", workflow="two")
    learn(counts, "abc", workflow="three")
    assert counts.forecast("one", ["a"], 1) is None
    third = counts.forecast("three", ["a"], 1)
    assert third is not None and third.agents == ("a", "b")
    assert counts.dropped == {"workflows": 1, "contexts": 0, "agents": 1}, "c followed"


def test_expected_waits_add_up_along_the_forecast() -> None:
    counts = VariableOrderCounts()
    learn(counts, *["abc"] * 50)
    for _ in range(50):
        counts.observe_wait("swe", "a", "b", 2.0)
        counts.observe_wait("swe", "b", "c", 8.0)
    forecast = counts.forecast("swe", ["a"], 2)
    assert forecast is not None and forecast.wait_s is not None
    np.testing.assert_allclose(forecast.wait_s, [2.0, 10.0], rtol=0.15)


def test_a_wrong_setting_names_the_rule() -> None:
    with pytest.raises(ConfigError, match="order is 0; it must be at least 1"):
        CountsOptions(order=0)
    with pytest.raises(ConfigError, match="needs numbers above zero"):
        CountsOptions(strength=(1.0, 0.0))


@settings(deadline=None)
@given(st.lists(st.text("abcd", max_size=14), max_size=12), st.text("abcde", max_size=16))
def test_every_forecast_is_a_distribution(runs: list[str], history: str) -> None:
    counts = VariableOrderCounts(CountsOptions(order=3, horizon=4, max_contexts=20))
    counts.prior("swe", ["a", "b"], [("a", "b")])
    learn(counts, *runs)
    forecast = counts.forecast("swe", list(history), 10)
    assert forecast is not None
    assert forecast.step.shape == (4, len(forecast.agents) + 1)
    assert (forecast.step >= 0).all()
    np.testing.assert_allclose(forecast.step.sum(1), 1.0, rtol=1e-6)


def test_the_walk_passes_through_graph_nodes_that_are_no_agents() -> None:
    edges = [
        ("__start__", "a"),
        ("a", "tool"),
        ("tool", "a"),
        ("tool", "check"),
        ("check", "b"),
        ("check", "tool"),
    ]
    hops = first_agents(["a", "b"], ["a", "b"], edges)
    # tool: half a, half check; check: half b, half tool; so a 2/3, b 1/3.
    np.testing.assert_allclose(hops[:2], [[0, 1, 0], [0, 2 / 3, 1 / 3]], atol=1e-2)
    np.testing.assert_allclose(hops[2], [1 / 3, 1 / 3, 1 / 3])


def test_propagation_conditions_on_survival() -> None:
    hops = np.array([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0]])
    steps = propagate(hops, 3)
    np.testing.assert_allclose(steps[0], [[0, 1, 0], [0.5, 0, 0.5], [1, 0, 0]])


def test_workflows_and_agents_that_clients_invent_stay_within_the_cells():
    options = CountsOptions(max_cells=60_000)
    counts = VariableOrderCounts(options)
    for n in range(512):
        counts.observe(f"ext:{n % 50}", (f"agent {n}", "b"), "c")
    cells = [workflow.rows.cells for workflow in counts._workflows.values()]
    assert sum(cells) <= options.max_cells
    assert counts.dropped["workflows"] > 40

    # One workflow alone, with as many agents as there may be: its contexts give way.
    for n in range(200):
        counts.observe("ext:one", tuple(f"agent {(n * k) % 256}" for k in range(8)), f"agent {n % 256}")
    (one,) = [counts._workflows["ext:one"]]
    assert one.rows.counts.size <= options.max_cells
    assert counts.dropped["contexts"] > 0
