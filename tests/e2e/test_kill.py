"""kill -9 of one process after the other, under load: nothing is lost, and nothing says "running" for ever.

One application: gateway, runner on SQLite, controller, two engines of the tiny random-weight model. The table of
what each death cost is printed, and written to the file that PBKV_KILL_TABLE names.
"""

import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pbkv_ray.control.client import ControllerClient
from tests.e2e.load import ROUNDS, RUNS, Load, becomes, hit, served

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.soak]

APP = f"pbkv-kill-{os.getpid()}"  # Ray names its processes by it


@dataclass
class Row:
    """What one death did. Seconds are those of the load beyond the same load undisturbed; hits are device-cached
    tokens over prompt tokens: of the undisturbed load before, of the one with the death, of the one after it."""

    killed: str
    in_flight: int
    lost: int
    resumed: int
    extra_s: float
    hit_before: float
    hit_with: float
    hit_after: float = 0.0


def replica_pid(deployment: str) -> int:
    """The process of the replica that Ray names `ray::ServeReplica:APP:DEPLOYMENT`."""
    title = f"ray::ServeReplica:{APP}:{deployment}"
    (pid,) = [p.pid for p in psutil.process_iter(["cmdline"]) if title in " ".join(p.info["cmdline"] or ())]
    return pid


async def actor_pid(name: str, namespace: str) -> int:
    import ray

    actor = ray.get_actor(name, namespace=namespace)
    return int(await actor.__ray_call__.remote(lambda self: os.getpid()))


async def controller_pid() -> int:
    return await actor_pid(f"pbkv-controller-{APP}", "pbkv")


async def serve_controller_pid() -> int:
    return await actor_pid("SERVE_CONTROLLER_ACTOR", "serve")


async def engine_pids() -> list[int]:
    """Of one engine: its replica's process first."""
    from ray import serve

    return list(await serve.get_deployment_handle("Engine", APP).pids.remote())


async def engine_pid() -> int:
    return (await engine_pids())[0]


async def scheduler_pid() -> int:
    pids = (await engine_pids())[1:]
    return next(pid for pid in pids if "scheduler" in " ".join(psutil.Process(pid).cmdline()))


async def runner_pid() -> int:
    return replica_pid("Runner")


async def gateway_pid() -> int:
    return replica_pid("Gateway")


VICTIMS: dict[str, Callable[[], Awaitable[int]]] = {
    "runner": runner_pid,
    "gateway": gateway_pid,
    "Serve controller": serve_controller_pid,
    "controller": controller_pid,
    "SGLang scheduler": scheduler_pid,
    "engine replica": engine_pid,
}


@pytest.fixture(scope="module")
def url(ray_cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    database = f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('kill') / 'runs.sqlite'}"
    with served(APP, tiny_model, database, policy="pbkv", engine_replicas=2) as url:
        yield url


async def living_engines() -> set[str]:
    from ray import serve

    handle = serve.get_deployment_handle("Engine", APP)
    return {replica for replica, _ in await handle.broadcast("labelled_metrics").results_async(timeout_s=60)}


async def credited() -> set[str]:
    return set(await ControllerClient(APP, timeout_s=30.0).replicas())


async def unsettled() -> dict[str, Any]:
    """Empty once two engines live, the controller credits these and no other, and knows of no run any more."""
    living, known = await living_engines(), await credited()
    active = (await ControllerClient(APP, timeout_s=30.0).counts())["runs_active"]
    if len(living) == 2 and living == known and active == 0:
        return {}
    return {"living": living, "credited": known, "runs_active": active}


async def undisturbed(url: str, name: str) -> tuple[float, float]:
    """(seconds, hit) of the load when nobody dies."""
    load = Load(url)
    await load.submit(name)
    runs = await load.ended()
    assert {run["status"] for run in runs} == {"success"}
    return time.time() - load.began_s, hit(await load.calls())


async def killed(url: str, name: str, victim: Callable[[], Awaitable[int]], usual: tuple[float, float]) -> Row:
    load = Load(url)
    await load.submit(name)
    in_flight = await load.in_full_swing()
    pid = await victim()
    os.kill(pid, signal.SIGKILL)
    runs = await load.ended()
    seconds = time.time() - load.began_s
    calls = await load.calls()
    for run in runs:
        if run["status"] != "success":
            print(f"{name}: run {run['run_id']} ended as {run['status']}: {run.get('error')}")
    return Row(
        killed=name,
        in_flight=in_flight,
        lost=sum(run["status"] != "success" for run in runs),
        resumed=sum(run["attempt"] > 1 for run in runs),
        extra_s=round(seconds - usual[0], 1),
        hit_before=usual[1],
        hit_with=hit(calls),
    )


@pytest.fixture
def rows() -> Iterator[list[Row]]:
    """Printed whatever happens."""
    made: list[Row] = []
    yield made
    print("\n| killed (`kill -9`) | runs in flight | lost | resumed | extra seconds | hit before | with | after |")
    print("|---|---|---|---|---|---|---|---|")
    for row in made:
        print("| " + " | ".join(str(value) for value in asdict(row).values()) + " |")
    if where := os.environ.get("PBKV_KILL_TABLE"):
        Path(where).write_text(json.dumps([asdict(row) for row in made], indent=1) + "\n")


async def test_any_process_may_die_under_load(url: str, rows: list[Row]):
    await becomes({}, unsettled)
    usual = await undisturbed(url, "usual")
    run = (await Load(url).get("/v1/runs?limit=1"))[0]["run_id"]
    told = [call for call in (await Load(url).get(f"/v1/runs/{run}/kv"))["calls"] if call["missed"]]
    assert told, "no call says why it missed the new part of its prompt"
    for call in told:
        assert call["missed"][0]["start"] == call["cached_tokens"]["device"]
        assert call["missed"][-1]["end"] == call["prompt_tokens"]
    print(f"\n{RUNS} runs of {ROUNDS} calls take {usual[0]:.1f} s when nobody dies")
    chosen = os.environ.get("PBKV_KILL", "")
    for name, victim in VICTIMS.items():
        if chosen and name not in chosen.split(","):
            continue
        rows.append(await killed(url, name, victim, usual))
        print(rows[-1], flush=True)
        await becomes({}, unsettled)
        usual = await undisturbed(url, f"after the {name}")
        rows[-1].hit_after = usual[1]
        print(f"after the {name}: {usual[0]:.1f} s", flush=True)
    assert [(row.killed, row.lost) for row in rows] == [(row.killed, 0) for row in rows]
    assert await Load(url).get("/v1/runs?status=running&limit=100") == []
    assert await Load(url).get("/v1/runs?status=pending&limit=100") == []
