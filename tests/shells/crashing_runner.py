"""A runner in a process of its own, for the test that kills it: `python -m tests.shells.crashing_runner URL`.

It prints the id of a run that has done `plan`, has that stored, checkpoint and call, and waits in `write`.
"""

import asyncio
import sys

from tests.shells.runner_kit import Kit, request


async def main(url: str) -> None:
    async with Kit(url) as kit:
        runner = await kit.runner()
        run = await runner.create_run(request("wait for the end"))
        await kit.transport.waiting.wait()
        while (await runner.thread_state(run["thread_id"], None))["next"] != ["write"]:
            await asyncio.sleep(0.01)
        while not await runner.run_calls(run["run_id"]):
            await asyncio.sleep(0.01)
        print(run["run_id"], flush=True)
        await asyncio.Event().wait()


asyncio.run(main(sys.argv[1]))
