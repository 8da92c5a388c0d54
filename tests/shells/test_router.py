"""The request router: its copy of the table against a fake controller, and what it uses of Ray."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pbkv_ray.core.calls import Call, Caller, Message
from pbkv_ray.core.places import Changes, Place, ReplicaNews
from pbkv_ray.core.routing import Cost, Decision
from pbkv_ray.errors import UnavailableError
from pbkv_ray.routing.asked import Asked, asked_of
from pbkv_ray.routing.metrics import RouterMetrics
from pbkv_ray.routing.table import TableCopy

NOBODY = Changes(0, False, {}, {})
TWO = {"a": ReplicaNews("epoch", 1), "b": ReplicaNews("epoch", 1)}


def call(run: str, text: str = "word " * 400, number: int = 0) -> Call:
    return Call(f"{run}-{number}", Caller(run, "hover", "judge", 1), (Message("user", text),))


class FakeController:
    """Places every run on "b"; those named child-N are of the family "lead". Answers when `ready`; `news` is what
    `routes` gives out, then it waits."""

    def __init__(self, *news: tuple[bool, Changes]) -> None:
        self.news = list(news)
        self.ready = asyncio.Event()
        self.ready.set()
        self.fails = False
        self.asked: list[tuple[str, int]] = []
        self.moves: list[dict[str, str]] = []
        self.known: list[int] = []

    async def routes(self, since: int, wait_s: float = 5.0) -> tuple[bool, Changes]:
        self.known.append(since)
        if not self.news:
            await asyncio.Event().wait()
        return self.news.pop(0)

    async def place(self, run_id: str, prompt_tokens: int, among: Any, timeout_s: float) -> Any:
        self.asked.append((run_id, prompt_tokens))
        await self.ready.wait()
        if self.fails:
            raise UnavailableError("the controller did not answer place")
        parent = "lead" if run_id.startswith("child-") else None
        return Decision("b", "placed", prompt_tokens, (Cost("b", 1.0, 0.0, 0.0, 0.0),)), Place("b", parent)

    async def settled(self, homes: dict[str, str]) -> None:
        self.moves.append(homes)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def copy_of(controller: FakeController) -> tuple[TableCopy, Clock, RouterMetrics]:
    clock, metrics = Clock(), RouterMetrics()
    return TableCopy(controller, clock=clock, metrics=metrics), clock, metrics


def counted(metrics: RouterMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"pbkv_router_{name}_total", labels) or 0.0


async def chosen(table: TableCopy, run: str, tokens: int = 500) -> str | None:
    decision = await table.choose(Asked(run, tokens), ["a", "b"])
    return decision and decision.replica


async def begun(table: TableCopy, run: str, parent: str | None = None) -> str | None:
    decision = await table.choose(Asked(run, 500, begins=True, parent_run_id=parent), ["a", "b"])
    return decision and decision.replica


class TestTheCopyOfTheTable:
    async def test_an_unknown_run_costs_one_question_and_its_later_calls_none(self) -> None:
        controller = FakeController()
        table, _, metrics = copy_of(controller)
        assert [await chosen(table, "r", n) for n in (500, 600, 700)] == ["b", "b", "b"]
        assert controller.asked == [("r", 500)]
        assert counted(metrics, "consults", outcome="placed") == 1

    async def test_calls_of_one_run_that_come_at_once_share_the_question(self) -> None:
        controller = FakeController()
        controller.ready.clear()
        table, _, _ = copy_of(controller)
        calls = [asyncio.create_task(chosen(table, "r")) for _ in range(8)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        calls[0].cancel()  # the one that asked leaves
        controller.ready.set()
        assert await asyncio.gather(*calls[1:]) == ["b"] * 7
        assert len(controller.asked) == 1

    async def test_a_run_that_begins_is_placed_here_and_told(self) -> None:
        controller = FakeController((False, Changes(7, True, {}, TWO)))
        table, _, _ = copy_of(controller)
        await table._step()
        assert [await begun(table, run) for run in ("r1", "r2", "r1")] == ["a", "b", "a"]
        await table._telling  # type: ignore[misc]
        assert (controller.asked, controller.moves) == ([], [{"r1": "a", "r2": "b"}])

    async def test_a_run_that_begins_is_asked_for_where_nothing_is_known_of_replicas_or_of_its_parent(self) -> None:
        controller = FakeController((False, Changes(7, True, {"p": Place(home="a")}, TWO)))
        table, _, _ = copy_of(controller)
        assert await begun(table, "early") == "b"
        await table._step()
        assert [await begun(table, "child", "p"), await begun(table, "orphan", "q")] == ["a", "b"]
        assert [run for run, _ in controller.asked] == ["early", "orphan"]

    async def test_siblings_that_the_table_knows_without_a_home_of_their_family_ask_for_it_once(self) -> None:
        told = {f"child-{n}": Place(parent="lead") for n in range(3)}
        controller = FakeController((False, Changes(7, True, told, TWO)))
        table, _, _ = copy_of(controller)
        await table._step()
        homes = [await begun(table, run, "lead") for run in told]
        assert (homes, [run for run, _ in controller.asked]) == (["b", "b", "b"], ["child-0"])

    async def test_without_a_controller_runs_are_placed_here_and_stay(self) -> None:
        controller = FakeController()
        controller.fails = True
        table, clock, metrics = copy_of(controller)
        assert [await chosen(table, run) for run in ("r1", "r2", "r1", "r2")] == ["a", "b", "a", "b"]
        assert controller.asked == [("r1", 500)]  # it is not asked again at once
        assert counted(metrics, "consults", outcome="skipped") == 1
        clock.now_s += 2.0
        await chosen(table, "r3")
        assert [run for run, _ in controller.asked] == ["r1", "r3"]

    async def test_a_run_that_moves_is_told_to_the_controller(self) -> None:
        busy = {"a": ReplicaNews("epoch", 1, queued_tokens=50_000), "b": ReplicaNews("epoch", 1)}
        controller = FakeController((False, Changes(7, True, {"r": Place(home="a")}, busy)))
        table, _, _ = copy_of(controller)
        await table._step()
        assert await chosen(table, "r") == "b"
        await table._telling  # type: ignore[misc]
        assert controller.moves == [{"r": "b"}]
        await table.close()

    async def test_a_restarted_controller_is_merged_and_later_taken_as_it_is(self) -> None:
        full = Changes(7, True, {"old": Place(home="a"), "ended": Place(home="b")}, TWO)
        controller = FakeController(
            (False, full),
            (True, Changes(1, True, {}, {})),
            (False, Changes(2, False, {"old": Place()}, TWO)),
            (False, Changes(3, False, {}, TWO)),
            (False, Changes(4, True, {"old": Place(home="a")}, TWO)),
        )
        table, clock, _ = copy_of(controller)
        for _ in range(3):
            await table._step()
        assert (table.routes.get("old").home, "ended" in table.routes) == ("a", True)  # type: ignore[union-attr]
        clock.now_s += 60.0
        await table._step()
        await table._step()
        assert ("old" in table.routes, "ended" in table.routes) == (True, False)
        assert controller.known == [-1, 7, 1, 2, -1]


async def test_the_controllers_desk_tells_what_is_new_and_places_a_run_once() -> None:
    from pbkv_ray.config import ControllerOptions
    from pbkv_ray.control.actor import ControllerHost
    from pbkv_ray.core.events import Batch, RunEnded

    host = ControllerHost(ControllerOptions())
    epoch, before = await host.routes(None, -1, 0.01)
    waiting = asyncio.create_task(host.routes(epoch, before.version, 30.0))
    await asyncio.sleep(0)
    placed = [await host.place("r", 100, ["a", "b"]) for _ in range(2)]
    assert [(made[0].replica, made[0].reason) for made in placed if made] == [("a", "placed"), ("a", "home")]
    _, news = await waiting
    assert {run: place and place.home for run, place in news.places.items()} == {"r": "a"}
    await host.settled({"r": "nowhere"})  # a replica that the controller does not know
    await host.events(Batch("runner", 0, (RunEnded("r", "completed", 1.0),)))
    _, last = await host.routes(epoch, news.version, 30.0)
    assert last.places == {"r": None}
    await host.hints("b", "epoch", None, 0, 0.01)
    await host.settled({"r": "b", "early": "b"})  # one has ended, the other's start is on its way
    _, told = await host.routes(epoch, last.version, 30.0)
    assert {run: place and place.home for run, place in told.places.items()} == {"early": "b"}
    assert (await host.routes("another", 99, 30.0))[1].full


def test_what_is_read_of_a_call() -> None:
    caller = Caller("r", "hover", "judge", 1)
    body = {"messages": [{"content": "x" * 40}, {"content": [{"text": "y" * 40}, {"image": 1}, 3]}, "none"]}
    assert [asked_of(arguments) for arguments in ([call("r", "z" * 80)], (body, caller, None))] == [
        Asked("r", 20, begins=True)
    ] * 2
    later = Caller("r", "ext:cli", "judge", 2, "p")
    assert asked_of((body, later)) == Asked("r", 20, parent_run_id="p")
    assert [asked_of(arguments) for arguments in ((), ("x",), (body, None, None), ({"messages": 3}, caller))] == [
        None,
        None,
        None,
        Asked("r", 1, begins=True),
    ]


def test_what_is_used_of_ray_is_as_it_was() -> None:
    """A private method of Ray's is overridden. When this fails, read Ray's router before touching ours."""
    from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter as Base
    from ray.serve._private.request_router.request_router import FIFOMixin, RequestRouter
    from ray.serve._private.router import AsyncioRouter
    from ray.serve.experimental.capacity_queue_router import CapacityQueueRouter

    from pbkv_ray.routing.router import PbkvRouter

    assert issubclass(Base, FIFOMixin)  # without it calls of one request hang
    assert "_choose_replica_for_request" in vars(CapacityQueueRouter)
    wanted = inspect.signature(RequestRouter._choose_replica_for_request)
    assert list(wanted.parameters) == ["self", "pending_request", "is_retry"]
    assert list(inspect.signature(PbkvRouter._choose_replica_for_request).parameters) == list(wanted.parameters)
    source = inspect.getsource(AsyncioRouter)
    assert "request_router._choose_replica_for_request(" in source
    made = inspect.getsource(RequestRouter.__init__)
    assert "self._replicas: Dict[ReplicaID, RunningReplica] = {}" in made
    for name in ("_replicas_updated_event", "app_name", "select_available_replicas", "update_replicas"):
        assert hasattr(RequestRouter, name), name


def test_serve_gets_the_class_itself_and_no_copy_of_it() -> None:
    from pbkv_ray.routing.router import PbkvRouter, router_config

    made = router_config(consult_timeout_s=0.5, move_s=0.2)
    assert made.get_request_router_class() is PbkvRouter
    assert made.request_router_kwargs == {"consult_timeout_s": 0.5, "move_s": 0.2}


class FakeReplica:
    """What Ray's routers see of a replica; never full unless told."""

    def __init__(self, name: str) -> None:
        from ray.serve._private.common import DeploymentID, ReplicaID

        self.replica_id = ReplicaID(name, DeploymentID("Engine", "in-process"))
        self.node_id, self.availability_zone = "node", None
        self.multiplexed_model_ids: set[str] = set()
        self.max_ongoing_requests = 10
        self.waiting = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.waiting


def router_of(table: TableCopy, *names: str) -> Any:
    """A real router, on this loop, over fake replicas."""
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID

    from pbkv_ray.routing.router import PbkvRouter

    router = PbkvRouter(
        deployment_id=DeploymentID("Engine", "in-process"),
        handle_source=DeploymentHandleSource.REPLICA,
        self_node_id="node",
        self_actor_id="me",
        self_actor_handle=None,
        use_replica_queue_len_cache=True,
        prefer_local_node_routing=False,
    )
    router._table = table
    router.update_replicas([FakeReplica(name) for name in names])
    return router


def pending(*arguments: Any) -> Any:
    """All of one Serve request, as calls of a graph's parallel branches are."""
    from ray.serve._private.common import RequestMetadata
    from ray.serve.request_router import PendingRequest

    metadata = RequestMetadata(request_id="request", internal_request_id="the same for all")
    return PendingRequest(args=list(arguments), kwargs={}, metadata=metadata)


async def routed(router: Any, *arguments: Any, is_retry: bool = False) -> str:
    request = pending(*arguments)
    async with asyncio.timeout(10):
        replica = await router._choose_replica_for_request(request, is_retry=is_retry)
    return str(replica.replica_id.unique_id)


class TestTheRouterInThisProcess:
    @pytest.fixture
    async def router(self) -> AsyncIterator[Any]:
        controller = FakeController()
        controller.fails = True  # runs are placed here
        table, _, _ = copy_of(controller)
        yield router_of(table, "a", "b", "c")
        await table.close()

    async def test_calls_of_one_request_go_home_each(self, router: Any) -> None:
        runs = [f"r{n}" for n in range(6)]
        homes = await asyncio.gather(*(routed(router, call(run, number=n)) for n in range(8) for run in runs))
        assert homes == ["a", "b", "c", "a", "b", "c"] * 8

    async def test_a_call_that_was_turned_away_or_has_no_run_takes_one_of_two(self, router: Any) -> None:
        assert await routed(router, call("r")) == "a"
        calls = [routed(router, call("r"), is_retry=True), *(routed(router) for _ in range(8))]
        assert set(await asyncio.gather(*calls)) <= {"a", "b", "c"}
        assert await routed(router, call("r")) == "a"

    async def test_a_replica_that_left_or_is_full_is_not_chosen(self, router: Any) -> None:
        assert [await routed(router, call(run)) for run in ("r1", "r2")] == ["a", "b"]
        router.update_replicas([FakeReplica("b"), FakeReplica("c")])
        assert await routed(router, call("r1")) == "c"
        for replica_id in router.curr_replicas:
            if replica_id.unique_id == "b":
                router.on_new_queue_len_info(replica_id, 10)
        assert await routed(router, call("r2")) == "c"

    async def test_what_fails_in_our_choice_leaves_the_call_to_ray(
        self, router: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fails(*arguments: Any) -> None:
            raise RuntimeError("a mistake of ours")

        monkeypatch.setattr(router._table, "choose", fails)
        assert await routed(router, call("r")) in {"a", "b", "c"}

    async def test_without_replicas_a_call_waits_for_one(self, router: Any) -> None:
        router.update_replicas([])
        waiting = asyncio.create_task(routed(router, call("r")))
        await asyncio.sleep(0)
        assert not waiting.done()
        router.update_replicas([FakeReplica("z")])
        assert await waiting == "z"
