"""The live page in a real Chromium: what a person sees, clicks and types; by `make soak`."""

import os
from pathlib import Path
from typing import Any

import pytest

from deployments.gateway import GatewayOptions
from tests.e2e.browser import CHROMIUM, Tab, browser
from tests.shells.gateway_kit import Kit
from tests.shells.watched import FakeController

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine: apt-get install chromium"),
]

KEY = "alice-0123456789abcdef"
CALL = {"attempt": 1, "output_tokens": 20, "host_cached_tokens": 0, "replica": "engine#0", "reason": "stop"}


def watched(runs: int, options: GatewayOptions | None = None) -> tuple[Kit, FakeController]:
    controller = FakeController()
    for number in range(runs):
        controller.run(f"run-{number}", number)
    controller.replica("app#Engine#one", [f"run-{number}" for number in range(runs)][:60])
    controller.view.tick(controller.now_s - 5)
    controller.run("late", 2)
    controller.view.tick(controller.now_s)
    return Kit(options or GatewayOptions(), watch=controller), controller


async def text(tab: Tab, selector: str) -> str:
    return str(await tab.value(f"document.querySelector({selector!r}).innerText"))


def only_from(url: str, tab: Tab) -> None:
    assert tab.complaints == []
    assert {address for address in tab.requests if not address.startswith(url)} <= {"about:blank"}


async def test_many_runs_are_one_page_and_a_click_shows_what_a_run_missed(tmp_path: Path) -> None:
    kit, controller = watched(1_000)
    spans = [
        {"start": 40, "end": 540, "cause": "evicted", "at_s": 990.0, "score": 0.25, "reason": "scored"},
        {"start": 540, "end": 700, "cause": "never_cached"},
    ]

    async def calls(run_id: str) -> list[dict[str, Any]]:
        return [{**CALL, "order": 1, "agent": "coder", "step": 2, "prompt_tokens": 700, "device_cached_tokens": 40}]

    async def kv(run_id: str) -> dict[str, Any]:
        return {"run_id": run_id, "calls": [{"order": 1, "routed": {"reason": "home"}, "missed": spans}]}

    async def run(thread_id: str | None, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id, "assistant_id": "hover", "status": "success", "metadata": {}}

    async def latest(thread_id: str | None, status: str | None, limit: int, offset: int) -> list[dict[str, Any]]:
        if status is not None:
            return []
        times = {"ended_at": "1970-01-01T00:16:00+00:00", "seconds": 12.0}
        return [{**await run(None, "yesterday"), **times}, {**await run(None, "going"), "status": "running"}]

    kit.service.run_calls, kit.service.run_kv, kit.service.get_run = calls, kv, run  # type: ignore[assignment,method-assign]
    kit.service.list_runs = latest  # type: ignore[assignment,method-assign]
    async with kit.served() as url, browser() as tab:
        await tab.look(1400, 1000)
        await tab.go(url)
        assert await tab.until("document.querySelectorAll('#runs tbody tr').length") == 50
        assert "1,001" in await text(tab, "#counts")
        assert "1 to 50 of 500; the 500 oldest of 1,001 are listed" in await text(tab, "#page")
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth")
        assert await tab.until("document.querySelectorAll('#ended-runs tbody tr').length") == 1
        assert (await text(tab, "#ended-runs tbody")).split()[:4] == ["yesterday", "hover", "success", "12"]
        await shot(tab, tmp_path, "overview")
        await tab.look(1400, 1000, dark=True)
        await shot(tab, tmp_path, "dark")

        # Page and search, without a reload; focus stays in the field while numbers move.
        await tab.click("#after")
        await tab.until("document.querySelector('#page').innerText.startsWith('51 to 100')")
        await tab.click("#find")
        await tab.type("run-477")
        await tab.until("document.querySelectorAll('#runs tbody tr').length == 1")
        controller.now_s += 100
        await tab.until("document.querySelector('#runs tbody tr td:last-child').innerText == '11 min'")
        assert await tab.value("document.activeElement.id") == "find"

        await tab.click("#runs tbody a")
        await tab.until("document.querySelectorAll('.spans li').length == 2")
        assert await tab.value("location.hash") == "#run=run-477"
        evicted, new = [await tab.value(f"document.querySelectorAll('.spans li')[{at}].innerText") for at in (0, 1)]
        assert "workflow\nhover" in await text(tab, "#run .facts")
        assert evicted.startswith("evicted 40 to 540 evicted before it was used again, by score, score 0.25, at ")
        assert new == "never cached 540 to 700 new: nobody had computed it here"
        await shot(tab, tmp_path, "run")
        await tab.click("#run a")
        await tab.until("!document.querySelector('#overview').hidden")
        only_from(url, tab)


async def test_the_keyboard_reaches_a_run(tmp_path: Path) -> None:
    kit, _ = watched(3)
    async with kit.served() as url, browser() as tab:
        await tab.look(1000, 700)
        await tab.go(url)
        await tab.until("document.querySelectorAll('#runs tbody tr').length == 4")
        for _ in range(12):
            await tab.key("Tab")
            if await tab.value("document.activeElement.closest('#runs') !== null"):
                break
        await tab.key("Enter")
        await tab.until("location.hash.startsWith('#run=')")
        await tab.until("document.querySelector('#run-title') !== null")
        assert await tab.value("document.activeElement.id") == "main"


async def test_a_server_with_keys_asks_for_one_and_keeps_it_in_the_tab() -> None:
    options = GatewayOptions(api_keys=(KEY,), salt_secret="a secret of the server")
    kit, _ = watched(2, options)
    async with kit.served() as url, browser() as tab:
        await tab.go(url)
        await tab.until("!document.querySelector('#key').hidden")
        assert await tab.value("document.activeElement.id") == "key-value"
        await tab.type("wrong-0123456789abcdef")
        await tab.key("Enter")
        await tab.until("document.querySelector('#key-error').innerText.includes('no valid API key')")
        await tab.type(KEY)
        await tab.key("Enter")
        await tab.until("document.querySelector('#link-text').innerText == 'live'")
        assert await tab.value("Object.values(sessionStorage)") == [KEY]
        assert await tab.value("Object.values(localStorage)") == []
        # None of these runs is the tenant's.
        assert await text(tab, "#none") == "No run is in flight. Start some: pbkv submit WORKFLOW"
        assert all(address.startswith(url) for address in tab.requests if address != "about:blank")


async def test_a_server_that_goes_and_comes_back_is_told_and_found_again() -> None:
    kit, _ = watched(2)
    async with browser() as tab:
        async with kit.served() as url:
            await tab.go(url)
            await tab.until("document.querySelector('#link-text').innerText == 'live'")
        await tab.until("document.querySelector('#link-text').innerText.startsWith('no connection')")
        assert await text(tab, "#says") != ""
        async with kit.served(int(url.rpartition(":")[2])):
            await tab.until("document.querySelector('#link-text').innerText == 'live'")


async def shot(tab: Tab, folder: Path, name: str) -> None:
    await tab.screenshot(Path(os.environ.get("PBKV_SCREENSHOTS") or folder) / f"{name}.png")
