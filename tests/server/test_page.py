"""The page, as a browser shows it: chats, what they cost, settings, keyboard, and how it looks."""

import time
from typing import Any

import pytest

from tests.internals.server import QueueFullError
from tests.server.browser import Browser
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine, FakeTicket

ASK = "Anna lives in Oslo. She plays the piano. What does Anna play?"
ESCAPE = "\ue00c"  # as WebDriver names it


def _ended(page: Browser, turns: int) -> None:
    page.until(lambda: page.run("return running === null && conversation.length") == turns, "no answer ended")


def _ask(page: Browser, text: str, turn: int) -> str:
    page.type("text", text + "\n")
    page.shows(f".exchange:nth-of-type({turn}) .figures", "reused")
    return _figures(page)[-1]


def _texts(page: Browser, selector: str) -> list[str]:
    return list(
        page.run("return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector)
    )


def _figures(page: Browser) -> list[str]:
    return _texts(page, ".figures")


def _answers(page: Browser) -> list[str]:
    return _texts(page, ".assistant .text")


def _parts(page: Browser, turn: int) -> list[tuple[str, int]]:
    """The parts of the bar of an answer: their kinds, and their shares of its width."""
    script = (
        "return [...document.querySelectorAll('.bar')[arguments[0]].children].map("
        "(one) => [one.dataset.from, Number(getComputedStyle(one).flexGrow)])"
    )
    return [(kind, tokens) for kind, tokens in page.run(script, turn)]


def _answer_with(page: Browser, *lines: str) -> None:
    """What the server would stream, for forms of answers that the models of these tests do not give."""
    page.run("const [body] = arguments; window.fetch = async () => new Response(body)", "\n".join(lines) + "\n")


def test_a_chat_with_its_figures(page: Browser) -> None:
    first = _ask(page, ASK, 1)
    assert "first token after" in first
    assert first.endswith(" tokens")
    second = _ask(page, "Where does Anna live?", 2)
    assert not second.startswith("0 of ")
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


@pytest.mark.slow
def test_an_error_is_shown_and_leaves_the_chat_as_it_was(page: Browser) -> None:
    page.run("document.getElementById('text').value = 'word '.repeat(9000)")
    page.click("send")
    page.shows(".error", "maximum context length")
    assert page.names(".error") == [("alert", "")]
    assert _answers(page) == []
    assert page.run("return document.getElementById('text').value.length") > 40000
    page.run("document.getElementById('text').value = ''")
    _ask(page, ASK, 1)
    assert _texts(page, ".error") == []


@pytest.mark.parametrize("way", ["stop", "escape", "new"])
def test_an_answer_grows_until_it_is_ended(browser: Browser, serve: Serve, way: str) -> None:
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
    assert browser.run("return [...document.querySelectorAll('.change')].every((one) => one.disabled)")
    if way == "escape":
        browser.press(ESCAPE)
    else:
        browser.click(way)
    assert engine.tickets[0].ended.wait(20)
    browser.until(lambda: not browser.run("return document.getElementById('send').disabled"), "it went on")
    if way == "new":
        assert _answers(browser) == []
        assert browser.run("return conversation.length") == 0
    else:
        browser.shows(".figures", "stopped")
        assert _answers(browser) == ["Anna"]
        assert browser.run("return history(conversation).at(-1).content") == "Anna "
    assert browser.run("return document.activeElement.id") == "text"


def test_settings_reach_the_request(fake_page: Browser, engine: FakeEngine, tokenizer: Any) -> None:
    page = fake_page
    _ask(page, "Who?", 1)
    assert engine.job.options.seed is None
    assert "system" not in tokenizer.decode(engine.job.ids)
    default = engine.job.options
    given = {"system": "Be brief.", "temperature": "0.25", "top_p": "0.5", "max_tokens": "2", "seed": "-3"}
    for field, value in given.items():
        page.type(field, value)
    assert "new tokens" in _ask(page, "Where?", 2)
    found = engine.job.options
    assert (found.temperature, found.top_p, found.max_tokens) == (0.25, 0.5, 2)
    assert found.seed == -3 % 2**63
    assert found.max_tokens != default.max_tokens
    told = tokenizer.decode(engine.job.ids)
    assert told.index("Be brief.") < told.index("Who?") < told.index("piano") < told.index("Where?")
    page.run("for (const id of ['max_tokens', 'temperature']) document.getElementById(id).value = ''")
    page.type("temperature", "3")
    page.type("text", "When?\n")
    assert page.run("return document.activeElement.id") == "temperature"
    assert len(engine.tickets) == 2


def test_retry_and_edit_replace_what_follows(fake_page: Browser, engine: FakeEngine, tokenizer: Any) -> None:
    page = fake_page
    for turn, text in enumerate(("Who?", "Where?", "When?"), 1):
        _ask(page, text, turn)
    whole = engine.tickets[1].job.ids
    page.run("document.querySelectorAll('.assistant .change')[1].click()")
    _ended(page, 2)
    assert engine.job.ids == whole
    assert _texts(page, ".user > p") == ["Who?", "Where?"]

    page.run("document.querySelector('.user .change').click()")
    assert page.names(".user textarea") == [("textbox", "Edit your message")]
    page.press(*"gone", ESCAPE)
    assert _texts(page, ".user > p") == ["Who?", "Where?"]
    assert page.run("return document.activeElement.getAttribute('aria-label')") == "Edit this message"
    page.press("\n", *" else?", "\n")
    _ended(page, 1)
    assert _texts(page, ".user > p") == ["Who? else?"]
    assert "Where?" not in tokenizer.decode(engine.job.ids)


def test_a_failed_retry_leaves_the_answers(fake_page: Browser, engine: FakeEngine) -> None:
    page = fake_page
    for turn, text in enumerate(("Who?", "Where?"), 1):
        _ask(page, text, turn)
    before = _answers(page)
    engine.error = QueueFullError("There is no room. Ask later.", 1)
    page.run("document.querySelector('.assistant .change').click()")
    page.shows(".error", "There is no room. Ask later.")
    assert _answers(page) == before
    assert page.run("return conversation.length") == 2
    # What was typed is not lost either.
    page.run("document.querySelector('.user .change').click()")
    page.press(*"!", "\n")
    page.until(lambda: page.run("return document.querySelector('.user textarea')?.value") == "Who?!", "no text")


def test_the_bar_and_the_sparkline_have_the_numbers_of_usage(fake_page: Browser, engine: FakeEngine) -> None:
    page = fake_page
    # So much for each token that is computed: half of them.
    engine.before = lambda ticket, piece: time.sleep(0.05 + 0.004 * len(ticket.job.ids) / 2 if not piece else 0)
    _ask(page, "Who?", 1)
    assert "saved" not in _figures(page)[0]
    assert page.names("#rates svg") == [("image", "Hit rate of each answer in percent: 50")]
    page.run("document.getElementById('text').value = 'Anna lives in Oslo. '.repeat(15)")
    page.click("send")
    _ended(page, 2)
    for turn, ticket in enumerate(engine.tickets):
        prompt = len(ticket.job.ids)
        reused = prompt // 2
        assert _parts(page, turn) == [("memory", reused), ("computed", prompt - reused)]
        assert f"{reused} of {prompt} prompt tokens reused · {reused} from ram" in _figures(page)[turn]
        assert f"{prompt - reused} computed · first token after" in _figures(page)[turn]
        saved = page.run("return secondsPerToken() * arguments[0]", reused)
        assert saved == pytest.approx(0.004 * reused, rel=0.3)
        assert "reuse saved about " in _figures(page)[turn]
    [(_, label)] = page.names("#rates svg")
    assert label in ("Hit rate of each answer in percent: 50, 50", "Hit rate of each answer in percent: 50, 49")
    assert page.run("return document.querySelector('#rates polyline').points.length") == 2
    page.shows("#rates", "% of all prompts of this chat")


def test_tiers_have_parts_of_their_own(fake_page: Browser) -> None:
    tiers = {"live": 10, "ram": 0, "valkey": 30, "disk": 20}
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 65, "cached_tokens_by_tier": tiers}}
    found = fake_page.run("return partsOf(arguments[0])", usage)
    assert [(part["from"], part["tokens"], part["name"]) for part in found] == [
        ("memory", 10, "from live"),
        ("memory", 5, "from the store"),
        ("disk", 20, "from disk"),
        ("remote", 30, "from valkey"),
        ("computed", 35, "computed"),
    ]
    assert fake_page.run("return partsOf({prompt_tokens: 7})") == [
        {"name": "computed", "tokens": 7, "from": "computed"}
    ]
    # Requests that had to wait do not change what a token costs.
    measured = [{"computed": tokens, "seconds": 0.1 + tokens / 500} for tokens in (10, 60, 300, 900)]
    script = "timed = arguments[0]; return secondsPerToken()"
    assert fake_page.run(script, [*measured, {"computed": 500, "seconds": 9}]) == pytest.approx(1 / 500, rel=0.05)
    assert fake_page.run(script, measured[:1]) is None
    assert fake_page.run(script, [{"computed": 10, "seconds": 2}, {"computed": 90, "seconds": 1}]) is None


def test_reasoning_is_folded_and_a_broken_connection_is_told(fake_page: Browser) -> None:
    page = fake_page
    delta = 'data: {"choices": [{"delta": {%s}}]}'
    _answer_with(page, delta % '"reasoning_content": "First <b>this</b>."', delta % '"content": "So **that**."')
    page.type("text", "Why?\n")
    page.shows(".error", "The connection ended before the answer did.")
    assert _texts(page, ".reasoning p") == ["First <b>this</b>."]
    assert page.run("return document.querySelector('.reasoning').open") is False
    assert _texts(page, ".assistant .text strong") == ["that"]
    page.run("window.fetch = async () => { throw new TypeError('Failed to fetch'); }")
    page.run("document.querySelector('.assistant .change').click()")
    page.shows(".error", "The server does not answer. Check that it runs, then try again.")
    assert _answers(page) == ["So that."]


def test_the_reader_is_followed_only_at_the_end(browser: Browser, serve: Serve) -> None:
    engine = FakeEngine(*(f"Line {number}.\n\n" for number in range(60)))
    steps = iter([30, 45, 60])
    until = next(steps)

    def wait(ticket: FakeTicket, piece: int) -> None:
        while piece >= until:
            time.sleep(0.01)

    engine.before = wait
    browser.open(serve(engine).url)
    browser.shows("#model", "reader")
    browser.type("text", "Count.\n")
    browser.shows(".assistant .text", "Line 29.")
    browser.until(lambda: browser.run("return $('chat').scrollTop > 0 && atEnd()"), "it did not follow")
    browser.run("$('chat').scrollTop = 20")
    until = next(steps)
    browser.shows(".assistant .text", "Line 44.")
    assert browser.run("return $('chat').scrollTop") == 20
    browser.run("follow()")
    until = next(steps)
    _ended(browser, 1)
    browser.shows(".assistant .text", "Line 59.")
    assert browser.run("return atEnd()")
