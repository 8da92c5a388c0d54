"""The live page's feed: one question to the controller a second, bounded pages, own runs only, and it may fail."""

import asyncio
import json
from importlib.resources import files
from typing import Any

import httpx

from deployments.gateway import GatewayOptions
from deployments.http.page import PAGES
from pbkv_ray.errors import UnavailableError
from tests.shells.fake_runs import AT
from tests.shells.gateway_kit import Kit
from tests.shells.watched import FakeController

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
SECURED = GatewayOptions(api_keys=(ALICE, BOB), salt_secret="a secret of the server", live_every_s=0.001)


def watched(runs: int, options: GatewayOptions | None = None) -> tuple[Kit, FakeController]:
    controller = FakeController()
    for number in range(runs):
        controller.run(f"run-{number}", number)
    controller.replica("engine#0", [f"run-{number}" for number in range(runs)])
    return Kit(options or GatewayOptions(), watch=controller), controller


async def snapshot(client: httpx.AsyncClient, **parameters: Any) -> dict[str, Any]:
    answer = await client.get("/v1/live/snapshot", params=parameters)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_many_viewers_cost_the_controller_one_question() -> None:
    kit, controller = watched(3)
    async with kit.client() as client:
        seen = await asyncio.gather(*(snapshot(client) for _ in range(20)))
    assert controller.asked == 1
    assert all(one == seen[0] for one in seen)
    assert seen[0]["runs"]["active"] == 3
    assert seen[0]["queue"] == {"pending": [], "more": False}


async def test_pages_follow_each_other_and_a_search_narrows_them() -> None:
    kit, _ = watched(700, GatewayOptions(live_page=100))
    async with kit.client() as client:
        first, second = await snapshot(client), await snapshot(client, offset=100)
        found = await snapshot(client, find="run-12", state="tool")
        beyond = await client.get("/v1/live/snapshot", params={"offset": 501})
    runs = first["runs"]
    assert (runs["active"], runs["listed"], runs["matched"], len(runs["rows"])) == (700, 500, 500, 100)
    ids = [row["run_id"] for row in runs["rows"] + second["runs"]["rows"]]
    assert ids == [f"run-{number}" for number in range(200)]
    assert [row["run_id"] for row in found["runs"]["rows"]] == ["run-124"]
    assert beyond.status_code == 422
    assert len(json.dumps(first)) < 60_000


async def test_a_tenant_sees_its_own_runs_and_no_name_of_anothers() -> None:
    kit, controller = watched(0, SECURED)
    asked = {"assistant_id": "hover", "input": {"steps": 0, "hold": True}}
    async with kit.client() as client:
        mine, theirs = [
            (await client.post("/runs", json=asked, headers={"x-api-key": key})).json()["run_id"]
            for key in (ALICE, BOB)
        ]
        foreign = f"ext:{kit.service.runs[mine].row['metadata']['pbkv_tenant']}:mine"
        for run in (mine, theirs, foreign, "ext:other:run"):
            controller.run(run, 2)
        controller.replica("engine#0", [theirs, mine])
        refused = await client.get("/v1/live/snapshot")
        answer = await client.get("/v1/live/snapshot", headers={"x-api-key": ALICE})
        for run in (mine, theirs):
            kit.service.release(run)
    assert refused.status_code == 401
    seen = answer.json()
    assert sorted(row["run_id"] for row in seen["runs"]["rows"]) == sorted([mine, foreign])
    assert seen["runs"]["active"] == 2
    assert theirs not in answer.text and "ext:other:run" not in answer.text
    (replica,) = seen["replicas"]
    assert [run for run, _ in replica["device"]["pieces"]] == [mine]
    assert replica["device"]["used"] == 16_384 - 2_200 - 3_100


async def test_a_controller_that_is_away_leaves_the_last_numbers_and_says_so() -> None:
    kit, controller = watched(1, GatewayOptions(live_every_s=0.0001))
    async with kit.client() as client:
        before = await snapshot(client)
        controller.error = UnavailableError("the controller did not answer live")
        await asyncio.sleep(0.001)
        after = await snapshot(client)
        controller.error = None
        await asyncio.sleep(0.001)
        again = await snapshot(client)
    assert after == {**before, "stale": "the controller did not answer live"}
    assert again == before


async def test_runs_that_wait_are_listed_first_come_first_with_place_and_reason() -> None:
    kit, _ = watched(0, GatewayOptions(live_page=2))
    rows = [
        {"run_id": f"r{place}", "assistant_id": "swe", "created_at": AT, "queue": {"position": place, "reason": "room"}}
        for place in (3, 2, 1)  # the store gives the newest first
    ]

    async def list_runs(thread_id: str | None, status: str, limit: int, offset: int) -> list[dict[str, Any]]:
        return rows[:limit] if status == "pending" else []

    kit.service.list_runs = list_runs  # type: ignore[assignment,method-assign]
    async with kit.client() as client:
        queue = (await snapshot(client))["queue"]
    shown = [(run["run_id"], run["workflow"], run["queue"]["position"]) for run in queue["pending"]]
    assert (shown, queue["more"]) == ([("r2", "swe", 2), ("r3", "swe", 3)], True)


async def test_a_gateway_without_a_controller_says_so() -> None:
    async with Kit().client() as client:
        seen = await snapshot(client)
    assert (seen["stale"], seen["runs"]["active"]) == (
        "this gateway has no controller to ask; runs are listed at /v1/runs",
        0,
    )


async def _served(client: httpx.AsyncClient) -> bool:
    async with client.stream("GET", "/v1/live") as response:
        return response.status_code == 200


async def test_the_stream_repeats_the_snapshot_and_forgets_who_leaves() -> None:
    kit, _ = watched(2, GatewayOptions(live_every_s=0.01, max_live_viewers=1))
    async with kit.served() as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("GET", "/v1/live") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            read = [await anext(lines) for _ in range(6)]
            refused = await client.get("/v1/live")
        # The server has seen the viewer go: the place is free again.
        async with asyncio.timeout(10):
            while not await _served(client):
                await asyncio.sleep(0.01)
    assert [read[0], read[2], read[3], read[5]] == ["event: live", "", "event: live", ""]
    assert json.loads(read[1].removeprefix("data: "))["runs"]["active"] == 2
    assert (refused.status_code, refused.json()["detail"]) == (
        503,
        "1 watch already, the most at a time; ask /v1/live/snapshot",
    )


async def test_the_page_is_served_without_a_key_and_asks_nobody_else() -> None:
    async with Kit(SECURED).client() as client:
        answers = {path: await client.get(path) for path in PAGES}
    assert {answer.status_code for answer in answers.values()} == {200}
    assert answers["/"].headers["content-type"] == "text/html; charset=utf-8"
    policy = answers["/"].headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy
    texts = "".join(answer.text for answer in answers.values())
    assert "http" not in texts.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched from elsewhere
    assert "style=" not in texts and "innerHTML" not in texts and "onclick=" not in texts
    # Every file of the folder is served.
    assert {name for name, _ in PAGES.values()} == {
        file.name for file in (files("deployments") / "dashboard").iterdir() if file.name != "__init__.py"
    }
