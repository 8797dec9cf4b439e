"""The page in a headless Chromium, driven over its debugging pipe: JSON messages that end with a zero byte."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.scheduler.messages import PrefillProgress, Stats
from dgpp_core.testing.fake_worker import FakeReply, FakeScript
from dgpp_core.text.tools.dialect import Call
from dgpp_core.text.tools.glm import GlmDialect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--force-device-scale-factor=1", "--font-render-hinting=none", "--no-sandbox", "about:blank",
)  # fmt: skip
ANSWER_S = 30.0


def find_browser() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """The debugging protocol: calls by name, events as they come."""

    def __init__(self, pid: int, read: int, write: int) -> None:
        self.pid, self._read, self._write = pid, read, write
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a protocol method."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            found = self._next(end)
            if found.get("id") == number:
                assert "error" not in found, (method, found["error"])
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)
        raise AssertionError(f"the browser did not answer {method}")

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], max(end - time.monotonic(), 0))[0], "the browser is silent"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has gone"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def browser(path: str, profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile, ended with the block."""
    ours, theirs = _high(os.pipe()), _high(os.pipe())  # from the browser, to the browser
    actions = [(os.POSIX_SPAWN_DUP2, theirs[0], 3), (os.POSIX_SPAWN_DUP2, ours[1], 4)]
    actions += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]  # type: ignore[misc]
    line = [path, *ARGUMENTS, f"--user-data-dir={profile}"]
    pid = os.posix_spawn(path, line, {**os.environ, "HOME": str(profile)}, file_actions=actions, setpgroup=0)
    os.close(theirs[0])
    os.close(ours[1])
    try:
        yield Browser(pid, ours[0], theirs[1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours[0])
        os.close(theirs[1])


def _high(pair: tuple[int, int]) -> tuple[int, int]:
    """The same pipe with numbers that 3 and 4 cannot overwrite."""
    found = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in pair]
    for fd in pair:
        os.close(fd)
    return found[0], found[1]


class Tab:
    """A page as a person uses it."""

    def __init__(self, driver: Browser, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Load the page anew in a window of this size, with nothing kept from before."""
        call = self.driver.call
        call("Storage.clearDataForOrigin", origin=self.url, storageTypes="all")
        mobile = width < 600
        call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        call("Emulation.setEmulatedMedia", features=[scheme, {"name": "prefers-reduced-motion", "value": "reduce"}])
        call("Page.navigate", url="about:blank")
        self.driver.events.clear()
        self.go()

    def go(self) -> None:
        """Load the page."""
        self.driver.call("Page.navigate", url=self.url + "/")
        self.wait("document.readyState === 'complete' && document.querySelector('#theme')?.textContent !== ''")

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited."""
        found = self.driver.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        """Until the expression holds."""
        end = time.monotonic() + seconds
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < end, f"waited in vain for {condition}\n{self.text()}"
            time.sleep(0.03)

    def text(self, selector: str = "body") -> str:
        """What a reader sees of an element."""
        return str(self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        at = self.js(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
                     "e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect(); "
                     "return [r.x + r.width / 2, r.y + r.height / 2]; })()")  # fmt: skip
        for kind in ("mousePressed", "mouseReleased"):
            self.driver.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.driver.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.driver.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.driver.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, file: Path) -> bytes:
        """The window as PNG, also written to ``file``."""
        data = base64.b64decode(self.driver.call("Page.captureScreenshot", format="png")["data"])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        return data

    def requests(self) -> list[str]:
        """The addresses that were asked for since `open`."""
        self.js("1")
        return [event["params"]["request"]["url"] for event in self.driver.events
                if event.get("method") == "Network.requestWillBeSent"]  # fmt: skip

    def complaints(self) -> list[str]:
        """Errors of scripts and of the page's policy since `open`; answers with an error status are none."""
        self.js("1")
        found = []
        for event in self.driver.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded" and params["entry"].get("source") != "network":
                found.append(params["entry"]["text"])
        return found


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The browser that all tests share."""
    path = find_browser()
    if path is None:
        pytest.skip(f"no Chromium was found (looked for {', '.join(NAMES)})")
    with browser(path, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def open_page(driver: Browser) -> Callable[..., Tab]:
    """``open_page(running, width=390, dark=True)``: the page of a front end."""

    def open_(running: Any, **window: Any) -> Tab:
        tab = Tab(driver, running.url)
        tab.open(**window)
        return tab

    return open_


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: the folder in DGPP_TEST_SCREENSHOTS, to look at them, or one that is thrown away."""
    named = os.environ.get("DGPP_TEST_SCREENSHOTS")
    return Path(named) if named else tmp_path_factory.mktemp("screenshots")


MARKDOWN = """Here is a **plan** with `code` and a [link](https://example.org/a).

## Steps

1. Sort both lists.
2. Merge them:
   - take the smaller head,
   - *until* one is empty.

```python
def merge(a, b):
    out = []
    while a and b:
        out.append((a if a[0] <= b[0] else b).pop(0))
    return out + a + b
```

| list | time |
|---|---|
| short | 1 ms |
| long | 20 ms |

> It is stable. <script>document.title = "broken"</script> stays text.
"""
STATS = Stats(
    blocks_total=1024, blocks_in_use=610, blocks_cached=230, snapshots_total=8, snapshots_in_use=3,
    prompt_tokens=81_000, prompt_tokens_computed=27_500, cache_tokens_saved=53_500, cache_hits=41, cache_misses=9,
    cache_evictions=2, draft_rounds=4000, draft_tokens=12_000, draft_accepted=8100, drafted_at=(4000, 4000, 4000),
    accepted_at=(3480, 2710, 1910), requests_finished=50,
    prefills=(PrefillProgress(id=7, slot=2, prompt_tokens=65_536, processed_tokens=41_000, cached_tokens=12_288),
              PrefillProgress(id=8, slot=5, prompt_tokens=9000, processed_tokens=1024, cached_tokens=0)),
)  # fmt: skip


@pytest.fixture(scope="session")
def talking(serve_fake: Any, write_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model that reasons, writes Markdown and calls a tool; a long reply takes its time."""
    spoken = GlmDialect()
    call = spoken.render([Call("get_weather", {"city": "Nürnberg", "days": 2, "units": ["celsius"]})])
    thought = "<think>The list is sorted, so I compare the heads. Then I take the smaller one.</think>"
    replies = (
        FakeReply(match="19 degrees", text="It is **19 degrees** in Nürnberg."),
        FakeReply(match="weather", text=f"<think>I need the weather.</think>I look it up.{call}"),
        FakeReply(match="merge", text=thought + MARKDOWN),
        FakeReply(match="ponder", text="<think>" + "I compare the heads and take the smaller one. " * 300),
        FakeReply(match="slowly", text="blue " * 3000),
        FakeReply(match="", text="Red, yellow and blue."),
    )
    template = (
        "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{%- endfor -%}"
        "<|im_start|>assistant\n"
        "{%- if enable_thinking is defined and not enable_thinking -%}<think></think>{%- endif -%}"
    )
    folder = write_checkpoint(tmp_path_factory.mktemp("page"), ("<think>", "</think>", *spoken.markers), template)
    script = FakeScript(replies=replies, stats=STATS, step_ms=4, cached_tokens=3)
    with serve_fake(script, model=folder, default_max_tokens=3000, served_id="demo-model-9b") as running:
        yield running
