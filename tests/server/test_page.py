"""The page, as a browser shows it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser import CHROMIUM, DRIVER, Browser
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine, FakeTicket

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no chromium, or no chromedriver")

ASK = "Anna lives in Oslo. She plays the piano. What does Anna play?"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(browser: Browser, reading: Listening) -> Browser:
    """With the right key."""
    browser.open(reading.url)
    browser.shows("#model", "an API key is needed")
    browser.type("key", "key\n")
    browser.shows("#model", "reader")
    return browser


def _ask(page: Browser, text: str, turn: int) -> str:
    page.type("text", text + "\n")
    page.shows(f".assistant:nth-child({2 * turn}) .figures", "reused")
    return str(page.run("return [...document.querySelectorAll('.figures')].at(-1).textContent"))


def _answers(page: Browser) -> list[str]:
    return list(page.run("return [...document.querySelectorAll('.assistant p')].map((one) => one.textContent)"))


def test_a_chat_with_its_figures(page: Browser) -> None:
    first = _ask(page, ASK, 1)
    assert "first token after" in first
    assert first.endswith(" tokens")
    second = _ask(page, "Where does Anna live?", 2)
    assert " 0 of " not in second
    assert "from ram" in second
    assert all(_answers(page))
    page.shows("#tokens", "from ram")
    page.shows("#requests", "ended: stop")
    page.click("new")
    assert _answers(page) == []
    _ask(page, ASK, 1)
    assert len(_answers(page)) == 1


def test_a_wrong_key_and_then_the_right_one(browser: Browser, reading: Listening) -> None:
    browser.open(reading.url)
    browser.type("key", "other\n")
    browser.shows("#model", "not known")
    browser.type("text", ASK + "\n")
    assert browser.run("return document.getElementById('text').value") == ASK
    browser.run("document.getElementById('key').value = ''")
    browser.type("key", "key\n")
    browser.shows("#model", "reader")
    browser.click("send")
    browser.shows(".assistant .figures", "reused")


def test_an_error_is_shown_and_leaves_the_chat_as_it_was(page: Browser) -> None:
    page.run("document.getElementById('text').value = 'word '.repeat(9000)")
    page.click("send")
    page.shows(".error", "exceeds the context window")
    assert _answers(page) == []
    assert page.run("return document.getElementById('text').value.length") > 40000
    page.run("document.getElementById('text').value = ''; document.getElementById('chat').replaceChildren()")
    _ask(page, ASK, 1)
    assert len(_answers(page)) == 1


@pytest.mark.parametrize("button", ["stop", "new"])
def test_an_answer_grows_until_it_is_ended(browser: Browser, serve: Serve, button: str) -> None:
    engine = FakeEngine("Anna ", "plays")

    def wait(ticket: FakeTicket, piece: int) -> None:
        if piece:
            assert ticket.cancelled.wait(20)

    engine.before = wait
    browser.open(serve(engine).url)
    browser.shows("#model", "reader")
    browser.type("text", "Who?\n")
    browser.shows(".assistant p", "Anna")
    assert browser.run("return document.getElementById('send').disabled")
    browser.click(button)
    assert engine.tickets[0].ended.wait(20)
    browser.until(lambda: not browser.run("return document.getElementById('send').disabled"), "it went on")
    if button == "stop":
        browser.shows(".figures", "stopped")
        assert _answers(browser) == ["Anna "]
    else:
        assert _answers(browser) == []
        assert browser.run("return messages.length") == 0


@pytest.mark.parametrize("width", [1200, 400])
def test_it_fits_the_window_and_loads_nothing_else(page: Browser, width: int, tmp_path: Path) -> None:
    page.devtools("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    page.logged()
    _ask(page, "A" * 60 + " " + ASK, 1)
    box: Any = page.run(
        "const {scrollWidth, scrollHeight} = document.documentElement;"
        "const send = document.getElementById('stop').getBoundingClientRect();"
        "return [scrollWidth, scrollHeight, send.right, send.bottom]"
    )
    assert box[:2] == [width, 800]
    assert box[2] <= width
    assert box[3] <= 800
    assert page.logged() == []
