import asyncio

from pbkv_ray.control.pump import EventPump
from pbkv_ray.core.events import Batch, CallStarted, RunEnded


def ended(n: int) -> RunEnded:
    return RunEnded(f"r{n}", "completed", 0.0)


async def test_events_of_one_moment_share_a_batch_and_stay_in_order():
    got: list[Batch] = []

    async def send(batch: Batch) -> None:
        got.append(batch)

    pump = EventPump("s", send, batch=2)
    for n in range(3):
        pump.emit(ended(n))
    await pump.close()
    assert got == [Batch("s", 0, (ended(0), ended(1))), Batch("s", 2, (ended(2),))]


async def test_a_batch_that_failed_is_sent_again_under_the_same_sequence():
    got: list[Batch] = []

    async def send(batch: Batch) -> None:
        got.append(batch)
        if len(got) == 1:
            raise ConnectionError("controller is away")

    pump = EventPump("s", send, retry_s=0.0)
    pump.emit(ended(0))
    await pump.close()
    assert got == [Batch("s", 0, (ended(0),))] * 2
    assert (pump.sent, pump.failures, pump.dropped) == (1, 1, 0)


async def test_beyond_the_capacity_the_oldest_go_and_are_counted():
    got: list[Batch] = []

    async def send(batch: Batch) -> None:
        got.append(batch)

    pump = EventPump("s", send, capacity=2)
    for n in range(5):
        pump.emit(ended(n))
    await pump.close()
    assert got == [Batch("s", 3, (ended(3), ended(4)), dropped=3)]


async def test_beyond_the_capacity_endings_outlast_what_is_only_useful():
    got: list[Batch] = []

    async def send(batch: Batch) -> None:
        got.append(batch)

    def called(n: int) -> CallStarted:
        return CallStarted(f"r{n}", "coder", 1, f"c{n}", 0.0)

    pump = EventPump("s", send, capacity=4)
    for event in (called(0), ended(0), called(1), ended(1), called(2), called(3), called(4)):
        pump.emit(event)
    await pump.close()
    (batch,) = got
    assert batch.events == (ended(0), called(3), ended(1), called(4))
    assert batch.dropped == 3


async def test_closing_gives_up_on_a_controller_that_never_answers():
    async def send(batch: Batch) -> None:
        await asyncio.Event().wait()

    pump = EventPump("s", send)
    pump.emit(ended(0))
    await pump.close(timeout_s=0.05)
    assert pump.dropped == 1
