"""A browser without a window, driven by chromedriver over HTTP."""

import base64
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.servers import free_port

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)
_WAIT_S = 30


class Browser:
    """One window.

    Args:
        folder: For its profile.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        assert DRIVER is not None
        port = free_port()
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
        self.until(self._listens, "chromedriver does not listen")
        chrome = {"binary": CHROMIUM, "args": [*_FLAGS.split(), f"--user-data-dir={folder}"]}
        asked = {"browserName": "chrome", "goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        told = self._http.post("/session", json={"capabilities": {"alwaysMatch": asked}}).raise_for_status()
        self._session = f"/session/{told.json()['value']['sessionId']}"

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.delete(self._session)
        self._http.close()
        self._driver.terminate()
        self._driver.wait()

    def open(self, url: str, width: int = 1200, height: int = 800) -> None:
        """A page, in a window of so many pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        self._post("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What JavaScript returns; `arguments[0]` is the first argument."""
        return self._post("execute/sync", script=script, args=arguments)

    def click(self, id: str) -> None:
        """Click an element."""
        self._post(f"element/{self._element(id)}/click")

    def type(self, id: str, text: str) -> None:
        """Press keys in an element."""
        self._post(f"element/{self._element(id)}/value", text=text)

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        self._keys([(kind, key) for key in keys for kind in ("keyDown", "keyUp")])

    def chord(self, held: str, key: str) -> None:
        """Press a key while another one is held."""
        self._keys([("keyDown", held), ("keyDown", key), ("keyUp", key), ("keyUp", held)])

    def names(self, selector: str) -> list[tuple[str, str]]:
        """The role and the name of elements, as the browser tells them to a screen reader."""
        found = self._post("elements", using="css selector", value=selector)
        return [(self._computed(one, "role"), self._computed(one, "label")) for [one] in map(dict.values, found)]

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._post("goog/cdp/execute", cmd=command, params=parameters)

    def screenshot(self, file: Path) -> None:
        """What the window shows, as PNG."""
        file.write_bytes(base64.b64decode(self.devtools("Page.captureScreenshot")["data"]))

    def logged(self) -> list[str]:
        """Errors and warnings since the last call."""
        return [str(line["message"]) for line in self._post("se/log", type="browser")]

    def until(self, holds: Callable[[], Any], otherwise: str) -> Any:
        """Wait for something to be true; returns it."""
        end = time.monotonic() + _WAIT_S
        while not (found := holds()):
            assert time.monotonic() < end, otherwise
            time.sleep(0.02)
        return found

    def shows(self, selector: str, text: str) -> None:
        """Wait until the text of an element contains a text."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText).join('\\n')"
        self.until(lambda: text in self.run(script, selector), f"{selector} never showed {text!r}")

    def _listens(self) -> bool:
        try:
            return bool(self._http.get("/status").json()["value"]["ready"])
        except httpx.ConnectError:
            return False

    def _element(self, id: str) -> str:
        [found] = self._post("element", using="css selector", value=f"#{id}").values()
        return str(found)

    def _keys(self, events: list[tuple[str, str]]) -> None:
        actions = [{"type": kind, "value": key} for kind, key in events]
        self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def _computed(self, element: str, what: str) -> str:
        answer = self._http.get(f"{self._session}/element/{element}/computed{what}")
        return str(answer.raise_for_status().json()["value"])

    def _post(self, command: str, **fields: Any) -> Any:
        answer = self._http.post(f"{self._session}/{command}", json=fields)
        assert answer.is_success, answer.text
        return answer.json()["value"]
