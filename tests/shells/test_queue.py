"""Who waits in the engine's queue for a sibling's prefix. No engine: prompts are arrays."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkv_ray.engine.queue import MIN_SHARED_TOKENS, Pace, Prompt, Queue, hold_back


def prompt(shared: int, own: int, seed: int = 1, tenant: str = "") -> Prompt:
    ids = np.concatenate([np.arange(shared), 1_000_000 * seed + np.arange(own)]).astype(np.int64)
    return Prompt(ids, (tenant, ids[:64].tobytes()))


COLD = [prompt(4_000, 100, seed) for seed in range(1, 9)]


def test_of_eight_siblings_with_a_cold_prefix_the_first_goes():
    assert hold_back(COLD, [], lambda _: 0) == dict.fromkeys(range(1, 8), 4_000)


def test_they_go_on_once_the_prefix_is_cached():
    assert hold_back(COLD, [], lambda _: 4_000) == {}
    assert hold_back(COLD, [], lambda _: 4_000 - MIN_SHARED_TOKENS + 1) == {}  # nearly all of it


def test_they_wait_for_one_that_is_being_computed():
    assert hold_back(COLD[1:3], COLD[:1], lambda _: 2_048) == {0: 4_000, 1: 4_000}


def test_a_cached_system_prompt_holds_nobody():
    waiting = [prompt(600, 5_000, seed) for seed in range(1, 5)]
    assert hold_back(waiting, [], lambda _: 600) == {}


def test_strangers_tenants_and_short_prompts_do_not_wait():
    short = Prompt(np.arange(100), None)
    waiting = [prompt(4_000, 9, tenant="a"), prompt(4_000, 9, 2, tenant="b"), prompt(0, 4_000, 3), short, short]
    assert hold_back(waiting, [], lambda _: 0) == {}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 600), st.integers(1, 3)), max_size=12), st.data())
def test_whoever_waits_shares_its_prefix_with_one_that_goes(shapes, data):
    waiting = [prompt(shared, own, seed) for shared, own, seed in shapes]
    cached = [data.draw(st.integers(0, len(one.ids))) for one in waiting]
    held = hold_back(waiting, [], lambda index: cached[index])
    for index, shared in held.items():
        before = [one for at, one in enumerate(waiting[:index]) if at not in held]
        assert any(np.array_equal(one.ids[:shared], waiting[index].ids[:shared]) for one in before)
        assert shared - cached[index] >= MIN_SHARED_TOKENS


def test_the_pace_is_tokens_over_time_between_a_prefill_and_the_next_plan():
    pace = Pace(keep=0.5)
    assert pace.tokens_s == 0.0
    for tokens, now_s in ((2_000, 0.0), (0, 1.0), (0, 5.0), (1_000, 6.0), (0, 6.25)):
        pace.planned(tokens, now_s)
    # 2,000 tokens in 1 s, then 1,000 in 0.25 s; decode batches do not count.
    assert pace.tokens_s == (2_000 / 2 + 1_000) / (1.0 / 2 + 0.25)


class FakeRequest:
    def __init__(self, ids: list[int]) -> None:
        self.origin_input_ids, self.extra_key = ids, None


class FakeScheduler:
    """Admits what is in its queue, at most two at a time."""

    chunked_req = None

    def __init__(self, queue: list[FakeRequest]) -> None:
        self.waiting_queue = queue

    def make(self) -> list[FakeRequest]:
        batch, self.waiting_queue = self.waiting_queue[:2], self.waiting_queue[2:]
        return batch


class ColdQueue(Queue):
    def cached_tokens(self, req: FakeRequest) -> int:
        return 0


def test_a_plan_leaves_the_queue_in_order_and_without_those_it_admitted():
    queue = ColdQueue(core=None)
    siblings = [FakeRequest([*range(600), 10_000 + n]) for n in range(3)]
    strangers = [FakeRequest([*range(50_000 + 1_000 * n, 50_600 + 1_000 * n)]) for n in range(2)]
    scheduler = FakeScheduler([siblings[0], siblings[1], strangers[0], siblings[2], strangers[1]])
    assert queue.plan(scheduler, scheduler.make) == [siblings[0], strangers[0]]
    assert scheduler.waiting_queue == [siblings[1], siblings[2], strangers[1]]
    # The first sibling may still be on its way into the tree, so the others wait once more.
    assert queue.plan(scheduler, scheduler.make) == [strangers[1]]
    assert queue.plan(scheduler, scheduler.make) == [siblings[1]]
    assert queue.held == 2


def test_a_failure_holds_nobody_and_loses_nobody():
    queue = ColdQueue(core=None)
    odd = FakeRequest(["no", "token"])  # type: ignore[list-item]
    scheduler = FakeScheduler([odd, FakeRequest([1]), FakeRequest([2])])
    assert len(queue.plan(scheduler, scheduler.make)) == 2
    assert (queue.failed, len(scheduler.waiting_queue)) == (True, 1)
