"""The plug-in in a real engine: owners reach the tree, hints reach the scheduler, facts come back."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from queue import Queue

import numpy as np
import pytest
import pytest_asyncio

from pbkv_ray.config import EngineOptions
from pbkv_ray.core.actions import PublishForecast
from pbkv_ray.core.events import Residency
from pbkv_ray.core.forecast import Forecast
from pbkv_ray.engine.facts import Evicted, Fact, HiddenState, Overseen
from pbkv_ray.engine.server import EngineServer
from tests.shells.engine_kit import answer, call

pytestmark = [pytest.mark.engine, pytest.mark.own_engine]

WAIT_S = 60.0
AGENTS = ("coder", "tester")
TEXT = "The tests of the parser fail since the last change. "


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pbkv(engine_options: EngineOptions) -> AsyncIterator[tuple[EngineServer, "Queue[Fact]"]]:
    facts: Queue[Fact] = Queue()
    options = replace(engine_options, policy="pbkv", device_pool_tokens=1_024, context_length=512)
    server = await asyncio.to_thread(EngineServer, options, replica="r1", on_fact=facts.put, hidden_states=True)
    yield server, facts
    await asyncio.to_thread(server.shutdown)


async def heard(facts: "Queue[Fact]", wanted: type, which: object = None) -> object:
    """The first fact of the type that `which` (a function) agrees to."""
    seen: list[Fact] = []
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while asyncio.get_running_loop().time() < deadline:
        fact = await asyncio.to_thread(facts.get, timeout=WAIT_S)
        if isinstance(fact, wanted) and (which is None or which(fact)):  # type: ignore[operator]
            return fact
        seen = [*seen[-8:], fact]
    raise AssertionError(f"no {wanted.__name__} as wanted came in {WAIT_S:g} s; the last facts were {seen}")


def text(server: EngineServer, begin: str, tokens: int) -> str:
    """About so many tokens, whatever the tokenizer."""
    words = begin
    while len(server.manager.tokenizer.encode(words)) < tokens:
        words += TEXT
    return words


async def test_the_first_and_the_last_hidden_state_of_a_call_arrive_in_half_precision(
    pbkv: tuple[EngineServer, "Queue[Fact]"],
) -> None:
    server, facts = pbkv
    asked = call("Is it true?", run="hidden", max_tokens=3)
    reply = await answer(server, asked)
    states = [await heard(facts, HiddenState, lambda s: s.call_id == asked.call_id) for _ in range(2)]
    assert [state.token for state in states] == ["prefill", "decoded"]  # type: ignore[attr-defined]
    assert {(state.vector.dtype, state.vector.shape) for state in states} == {  # type: ignore[attr-defined]
        (np.dtype(np.float16), (128,))
    }
    assert all(np.abs(state.vector).max() > 0 for state in states)  # type: ignore[attr-defined]
    assert reply.output_tokens == 3


async def test_residency_is_by_run_and_an_ended_run_is_gone_from_it(pbkv: tuple[EngineServer, "Queue[Fact]"]) -> None:
    server, facts = pbkv
    await answer(server, call(text(server, "", 60), run="first", agent="coder", max_tokens=2))
    await answer(server, call(text(server, "", 160), run="second", agent="coder", max_tokens=2))
    report = await heard(facts, Residency, lambda r: {"first", "second"} <= r.tokens.keys())
    assert isinstance(report, Residency)
    assert (report.replica, report.epoch) == ("r1", server.epoch)
    first, second = report.tokens["first"], report.tokens["second"]
    assert 0 < first[0] < second[0]
    assert first[1] > 0  # write_through: the host has a copy
    await server.retire("first")
    await heard(facts, Residency, lambda r: "first" not in r.tokens and "second" in r.tokens)


async def test_under_pressure_the_retired_go_first_then_what_is_not_forecast(
    pbkv: tuple[EngineServer, "Queue[Fact]"],
) -> None:
    server, facts = pbkv
    prompts = {agent: text(server, f"{agent}: ", 200) for agent in AGENTS}
    for agent in AGENTS:
        await answer(server, call(prompts[agent], run="look", agent=agent, max_tokens=2))
    step = np.array([[1.0, 0.0, 0.0]] * 3)
    server.publish(PublishForecast("look", 1, Forecast(AGENTS, step), at_s=time.time()))
    await answer(server, call(text(server, "ended: ", 200), run="ended", agent="coder", max_tokens=2))
    await server.retire("ended")
    await heard(facts, Residency, lambda r: "ended" not in r.tokens and "look" in r.tokens)
    for number in range(3):
        await answer(server, call(text(server, f"{number}: ", 200), run=f"new{number}", agent="coder", max_tokens=2))
    evicted = await heard(facts, Evicted, lambda e: e.tokens["device"]["retired"] > 0)
    assert isinstance(evicted, Evicted)
    assert (evicted.fallbacks, evicted.failures) == (0, 0)
    again = await answer(server, call(prompts["coder"], run="look", agent="coder", step=2, max_tokens=2))
    assert again.device_cached_tokens > 0.9 * again.prompt_tokens


async def test_an_operator_puts_lru_in_charge_and_gives_back_while_it_serves(
    pbkv: tuple[EngineServer, "Queue[Fact]"],
) -> None:
    server, facts = pbkv
    await server.switch_policy("lru")
    await heard(facts, Overseen, lambda o: o.state == "ordered")
    assert server.policy_state()["state"] == "ordered"
    wanted = text(server, "wanted: ", 200)
    await answer(server, call(wanted, run="switch", agent="coder", max_tokens=2))
    step = np.array([[1.0, 0.0, 0.0]] * 3)
    server.publish(PublishForecast("switch", 1, Forecast(AGENTS, step), at_s=time.time()))
    for number in range(5):  # as much as the pool: LRU keeps nothing of before, whatever is forecast
        await answer(server, call(text(server, f"x{number}: ", 220), run=f"x{number}", agent="tester", max_tokens=2))
    again = await answer(server, call(wanted, run="switch", agent="coder", step=2, max_tokens=2))
    assert again.device_cached_tokens < 0.5 * again.prompt_tokens
    await server.switch_policy("pbkv")
    back = await heard(facts, Overseen, lambda o: o.state == "policy")
    assert isinstance(back, Overseen)
    assert (back.policy, back.watches, back.failures) == ("pbkv", True, 0)
    said = server.policy_state()
    assert (said["policy"], said["follows"], said["state"], "error" in said) == ("pbkv", "pbkv", "policy", False)
    assert 'pbkv_engine_shadow_state{replica="r1",state="policy"} 1.0' in server.metrics_text()
