"""Opens reports in a real browser, steered through Chromium's debugging pipe."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rota.execute.events import Event, Launched, Lost, RunBegan, RunEnded
from rota.execute.record import RunRecord
from rota.report.html import render
from rota.runtime.messages import Began, Failed, Finished

pytestmark = pytest.mark.browser

LAPTOP = (1280, 800)
PHONE = (390, 844)
_ANSWER_S = 30.0
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and answers on descriptor 4.
_ON_3_AND_4 = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A headless Chromium with one page."""

    def __init__(self, program: str, profile: Path) -> None:
        (theirs_in, self._commands), (self._answers, theirs_out) = _high_pipe(), _high_pipe()
        flags = [*_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ON_3_AND_4, str(theirs_in), str(theirs_out), program, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        self._session = ""
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result; what happens meanwhile is kept in `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + _ANSWER_S
        while True:
            answer = self._next(deadline_s)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, path: Path, *, size: tuple[int, int], scheme: str) -> None:
        """Show a file in a window of this size, to a reader who prefers this colour scheme."""
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        deadline_s = time.monotonic() + _ANSWER_S
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next(deadline_s))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[dict[str, Any]]:
        """What would be red in the console."""
        self.evaluate("0")  # whatever was said before is in `events` after this
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in bad]

    def requests(self) -> list[str]:
        """Everything the page asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        """End the browser, and its children if it does not."""
        with contextlib.suppress(OSError):
            os.write(self._commands, b'{"id":0,"method":"Browser.close"}\0')
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=10)
        os.close(self._commands)
        os.close(self._answers)

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._answers, 1 << 16)
            assert part, "Chromium is gone"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


def _high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are neither 3 nor 4."""
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return ends[0], ends[1]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((path for path in map(shutil.which, names) if path), None)
    if program is None:
        if os.environ.get("ROTA_REQUIRE_BROWSER") == "1":
            pytest.fail(f"ROTA_REQUIRE_BROWSER is 1, and none of {', '.join(names)} is installed")
        pytest.skip(f"none of {', '.join(names)} is installed")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def write_report_of(path: Path, *, tasks: int, devices: int = 2) -> Path:
    """The report of a run in which the first task lost a worker and the last one failed."""
    names = [f"gpt-lr{0.0003 * (i + 1):.4f}-depth{2 + i}-width{64 * (i + 1)}" for i in range(tasks)]
    events: list[tuple[float, Event]] = [
        (
            1e9,
            RunBegan(
                name="a-run-with-quite-a-long-name-that-has-to-wrap-on-a-phone",
                source="examples/sweep.py",
                source_digest="",
                sweep_digest="",
                tasks=tuple(
                    {"name": name, "settings": {"lr": 0.1 * i, "note": "n" * 60}} for i, name in enumerate(names)
                ),
                devices=tuple({"index": i, "kind": "cpu", "label": "A CPU"} for i in range(devices)),
            ),
        )
    ]
    histories = {}
    for i, name in enumerate(names):
        begin_s, device, attempt = 1e9 + 60 * (i // devices), f"cpu:{i % devices}", 1
        events.append((begin_s, Launched(task=name, attempt=1, devices=(device,))))
        if i == 0:
            events.append(
                (begin_s + 9, Lost(task=name, attempt=1, device=device, reason="it was killed", retried=True))
            )
            events.append((begin_s + 9, Launched(task=name, attempt=2, devices=(device,))))
            attempt = 2
        events.append((begin_s + 10, Began(task=name, attempt=attempt, from_step=0, total_steps=900, parameters=12345)))
        rows = [{"step": float(step), "train/loss": 2 + i / 9 + math.exp(-step / 99)} for step in range(1, 901)]
        for row in rows[99::100]:
            row["valid/loss"] = row["train/loss"] + 0.1
        histories[name] = rows
        if i and i == tasks - 1:
            trace = "Traceback (most recent call last):\n" + "x" * 300 + "\n<script>document.title = 'hacked'</script>"
            failed = Failed(
                task=name, attempt=1, step=900, reason="ValueError: <b>no</b> " + "y" * 200, traceback=trace
            )
            events.append((begin_s + 55, failed))
        else:
            final = {key: value for key, value in rows[-1].items() if key != "step"}
            events.append((begin_s + 55, Finished(task=name, attempt=attempt, step=900, metrics=final)))
    events.sort(key=lambda pair: pair[0])
    events.append((events[-1][0], RunEnded(state="incomplete" if tasks > 1 else "finished")))
    path.write_text(render(RunRecord.replay(events), histories), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("tasks", [1, 6, 30])
def test_page_is_whole(browser: Browser, tmp_path: Path, tasks: int, size: tuple[int, int], scheme: str) -> None:
    page = write_report_of(tmp_path / "report.html", tasks=tasks)
    browser.open(page, size=size, scheme=scheme)
    assert browser.evaluate("innerWidth") == size[0]
    assert browser.evaluate(f"matchMedia('(prefers-color-scheme: {scheme})').matches") is True
    assert "a-run-with" in browser.evaluate("document.querySelector('h1').innerText")
    assert browser.evaluate("document.title").startswith("a-run-with")
    assert browser.evaluate("document.querySelectorAll('table')[0].tBodies[0].rows.length") == tasks
    assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
    boxes = browser.evaluate(
        "[...document.querySelectorAll('.line > path')].map(p => p.getBoundingClientRect())"
        ".map(box => [box.width, box.height])"
    )
    assert len(boxes) == 2 * tasks
    assert all(width > 100 and height > 20 for width, height in boxes)
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_nothing_sticks_out_or_overlaps(browser: Browser, tmp_path: Path, size: tuple[int, int]) -> None:
    browser.open(write_report_of(tmp_path / "report.html", tasks=6), size=size, scheme="light")
    outside = browser.evaluate(
        f"[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect())"
        f".filter(b => b.width && (b.left < 0 || b.right > {size[0]})).length"
    )
    assert outside == 0
    overlapping = browser.evaluate("""
        [...document.querySelectorAll('.axis')].map(axis => {
            const boxes = [...axis.querySelectorAll('text')].map(t => t.getBoundingClientRect()).filter(b => b.width);
            return boxes.filter((a, i) => boxes.some((b, j) => j > i && a.left < b.right && b.left < a.right
                && a.top < b.bottom - 1 && b.top < a.bottom - 1)).length;
        })""")
    assert set(overlapping) == {0}


def test_light_and_dark_differ_and_are_readable(browser: Browser, tmp_path: Path) -> None:
    page = write_report_of(tmp_path / "report.html", tasks=6)
    looks = {}
    for scheme in ("light", "dark"):
        browser.open(page, size=LAPTOP, scheme=scheme)
        looks[scheme] = [
            sum(map(int, color[4:-1].split(",")))
            for color in browser.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
        ]
    assert looks["light"][0] > 600 > 200 > looks["light"][1]
    assert looks["dark"][1] > 600 > 200 > looks["dark"][0]


def test_hovering_a_key_makes_its_line_stand_out(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_report_of(tmp_path / "report.html", tasks=6), size=LAPTOP, scheme="light")
    x, y = browser.evaluate("""(key => {
        key.scrollIntoView({block: 'center'});
        const box = key.getBoundingClientRect();
        return [box.left + 30, box.top + box.height / 2];
    })(document.querySelector('.key.t3'))""")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.evaluate("document.getAnimations().forEach(animation => animation.finish())")
    opacities = browser.evaluate(
        "[...document.querySelectorAll('.line')].map(l => [l.classList.contains('t3'), +getComputedStyle(l).opacity])"
    )
    assert all((opacity == 1) == chosen for chosen, opacity in opacities)


def test_following_a_link_opens_the_task(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_report_of(tmp_path / "report.html", tasks=6), size=LAPTOP, scheme="light")
    assert browser.evaluate("document.querySelector('#task-2').closest('details').open") is False
    browser.evaluate("document.querySelector('tbody a[href=\"#task-2\"]').click()")
    browser.evaluate("location.hash")
    assert browser.evaluate("document.querySelector('#task-2').closest('details').open") is True
