"""A headless chromium that a test drives over its DevTools protocol: one page, its errors, its pictures."""

import asyncio
import base64
import contextlib
import itertools
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from rose.node.processes import ServerProcess

PATIENCE_S = 300.0
"""For what takes a second, on a machine that is busy with something else."""
POLL_S = 0.05
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # refuses to run as root otherwise; it sees our own page alone
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)


class Browser:
    """One page. Use as an async context manager."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self._profile = folder / "profile"
        argv = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = ServerProcess(argv, "chromium", folder / "chromium.log")
        self._numbers = itertools.count(1)
        self._loaded: set[str] = set()
        self.errors: list[str] = []
        """What the page wrote to the console as an error, exceptions included."""

    async def __aenter__(self) -> Self:
        self._process.start()
        try:
            await self._connect()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for closing in (getattr(self, "_socket", None), getattr(self, "_http", None)):
            if closing is not None:
                await closing.close()
        await asyncio.to_thread(self._process.stop, 1.0)

    async def _connect(self) -> None:
        port_file = self._profile / "DevToolsActivePort"

        def is_ready() -> bool:
            return port_file.exists() and len(port_file.read_text().split()) == 2

        await asyncio.to_thread(self._process.wait_until, is_ready, "DevTools port", PATIENCE_S)
        port = port_file.read_text().split()[0]
        self._http = aiohttp.ClientSession()
        while not (pages := await self._pages(port)):  # the port comes first
            await asyncio.sleep(POLL_S)
        [page] = pages
        self._socket = await self._http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=2**26)
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        await self.send("Page.setLifecycleEventsEnabled", enabled=True)

    async def _pages(self, port: str) -> list[dict[str, Any]]:
        async with self._http.get(f"http://127.0.0.1:{port}/json/list") as answer:
            return [each for each in await answer.json() if each["type"] == "page"]

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while (message := await self._hear()).get("id") != number:
            pass
        assert "error" not in message, f"{method}: {message['error']}"
        result: dict[str, Any] = message["result"]
        return result

    async def _hear(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json(timeout=PATIENCE_S)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, seen: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = seen["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and seen["type"] in ("error", "assert"):
            self.errors.append(str(seen["args"]))
        elif event == "Log.entryAdded" and seen["entry"]["level"] == "error":
            self.errors.append(f"{seen['entry']['text']} {seen['entry'].get('url', '')}")
        elif event == "Page.lifecycleEvent" and seen["name"] == "load":
            self._loaded.add(seen["loaderId"])

    async def open(self, url: str) -> None:
        """Until it has loaded: what is evaluated before may be lost with the page that it replaces."""
        page = await self.send("Page.navigate", url=url)
        while page["loaderId"] not in self._loaded:
            await self._hear()

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def text(self, selector: str) -> str:
        """Of the first element found, empty if there is none."""
        return str(await self.value(f"document.querySelector({selector!r})?.innerText ?? ''"))

    async def wait_for(self, selector: str, pattern: str) -> str:
        """Until the element's text matches."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while not re.search(pattern, text := await self.text(selector)):
                    await asyncio.sleep(POLL_S)
                return text
        raise AssertionError(f"{selector}: never {pattern!r}; the page: {await self.text('body')}")

    async def picture(self, path: Path, width: int, height: int, scheme: str = "light") -> None:
        """The whole page as it is drawn at this width."""
        await self.send("Emulation.setEmulatedMedia", features=[_scheme(scheme)])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


def _scheme(name: str) -> dict[str, str]:
    return {"name": "prefers-color-scheme", "value": name}
