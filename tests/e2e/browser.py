"""A headless Chromium over the DevTools protocol: one tab, what it asked for, and what its console complained of."""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
WAIT_S = 300.0


class Tab:
    """`requests` are the addresses it asked for; `complaints`: errors, warnings and exceptions of its console."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def open(self) -> None:
        target = (await self._do("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self._do("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self._do(f"{domain}.enable")

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def go(self, url: str) -> None:
        await self._do("Page.navigate", url=url)

    async def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the window and the colour scheme that the user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self._do("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self._do("Emulation.setEmulatedMedia", features=scheme)

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression. Raises AssertionError when it throws."""
        answer = await self._do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Asks until it is true; what it is then. Raises AssertionError after a time that only a hang takes.

        One that throws is not true yet: what it looks at may not be there."""
        expression = f"(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()"
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not (found := await self.value(expression)):
            assert asyncio.get_running_loop().time() < deadline, f"{expression} has not become true"
            await asyncio.sleep(0.1)
        return found

    async def click(self, selector: str) -> None:
        """With the mouse, where the element is, as a user does."""
        wanted = json.dumps(selector)
        await self.until(f"document.querySelector({wanted}) !== null")
        await self.value(f"document.querySelector({wanted}).scrollIntoView({{block: 'center'}})")
        box = await self.value(
            f"(() => {{ const box = document.querySelector({wanted}).getBoundingClientRect();"
            " return [box.x + Math.min(20, box.width / 2), box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            await self._do("Input.dispatchMouseEvent", type=kind, **place)

    async def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            enter = {"text": "\r", "windowsVirtualKeyCode": 13} if name == "Enter" else {}
            tab = {"windowsVirtualKeyCode": 9} if name == "Tab" else {}
            await self._do("Input.dispatchKeyEvent", type=kind, key=name, code=name, **enter, **tab)

    async def type(self, text: str) -> None:
        await self._do("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> None:
        picture = base64.b64decode((await self._do("Page.captureScreenshot", format="png"))["data"])
        await asyncio.to_thread(path.write_bytes, picture)

    async def _do(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            asked["sessionId"] = self._session
        await self._socket.send(json.dumps(asked))
        return await asyncio.wait_for(answer, WAIT_S)

    async def _read(self) -> None:
        async for text in self._socket:
            told = json.loads(text)
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if "error" in told:
                    answer.set_exception(AssertionError(told["error"]["message"]))
                else:
                    answer.set_result(told["result"])
                continue
            self._hear(told["method"], told.get("params", {}))

    def _hear(self, method: str, told: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """A fresh Chromium with a profile of its own; it may reach loopback only."""
    profile = Path(tempfile.mkdtemp(prefix="pbkv-browser-"))
    arguments = [
        "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-gpu",
        "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]  # fmt: skip
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium refuses root otherwise
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *arguments,
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(WAIT_S):
            while (
                not (profile / "DevToolsActivePort").exists()
                or "\n" not in (profile / "DevToolsActivePort").read_text()
            ):
                await asyncio.sleep(0.1)
        port, path = (profile / "DevToolsActivePort").read_text().split()
        async with connect(f"ws://127.0.0.1:{port}{path}", max_size=64 * 1024 * 1024, ping_interval=None) as socket:
            tab = Tab(socket)
            await tab.open()
            yield tab
            await tab.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        shutil.rmtree(profile, ignore_errors=True)
