"""The page: Markdown of a model that nobody trusts, keyboard and screen reader, dark mode, and narrow windows."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.browser import Browser
from tests.server.fake_engine import FakeEngine

ESCAPE, SHIFT, TAB, CONTROL = "\ue00c", "\ue008", "\ue004", "\ue009"  # as WebDriver names them

MARKDOWN = """# Title

Some **bold *nested* text**, `a <b>`, snake_case_name, 2 * 3 * 4 and [a link](https://example.org/a_(b)).

1. one
2. two
   - nested
3. three

> quoted

| name | value |
| :--- | ---: |
| a\\|b | **1** |

```python
if a < b and "</code>":
    print("`")
```

Behind ***it***.
"""
HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2">
<a href="javascript:window.hit = 3">x</a>

[one](javascript:window.hit=4) [two](JaVaScRiPt:window.hit=5) [three](data:text/html,<script>window.hit=6</script>)
![four](https://example.org/x.png) <https://example.org/" onmouseover="window.hit=7> [five](vbscript:x) [six](//x.org)
[seven](https://example.org/"onclick="window.hit=8)

```html"><script>window.hit=9</script>
</code></pre><script>window.hit=10</script><img src=x onerror="window.hit=11">
```

| <img src=x onerror="window.hit=12"> | </table><script>window.hit=13</script> |
| --- | --- |
| `<svg onload="window.hit=14">` | &lt;script&gt; |
"""


def _say(page: Browser, engine: FakeEngine, text: str) -> None:
    """Have the engine answer with a text, in pieces."""
    engine.says = [text[at : at + 7] for at in range(0, len(text), 7)]
    page.type("text", "Say it.\n")
    page.until(lambda: page.run("return running === null && conversation.length"), "no answer ended")


def _shown(page: Browser, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll('.assistant .text ' + arguments[0])].map((one) => one.textContent)"
    return list(page.run(script, selector))


def test_markdown(fake_page: Browser, engine: FakeEngine) -> None:
    page = fake_page
    _say(page, engine, MARKDOWN)
    assert _shown(page, "> h3") == ["Title"]
    assert _shown(page, "p > strong") == ["bold nested text", "it"]
    assert _shown(page, "strong > em") == ["nested", "it"]
    assert _shown(page, "p > code") == ["a <b>"]
    assert "snake_case_name, 2 * 3 * 4" in _shown(page, "> p")[0]
    assert _shown(page, "> ol > li > p") == ["one", "two", "three"]
    assert _shown(page, "> ol > li:nth-child(2) > ul > li") == ["nested"]
    assert _shown(page, "blockquote") == ["quoted"]
    assert _shown(page, "th") + _shown(page, "td") == ["name", "value", "a|b", "1"]
    assert _shown(page, "pre > code") == ['if a < b and "</code>":\n    print("`")']
    link = "const [one] = document.querySelectorAll('.text a'); return [one.href, one.rel, one.target]"
    assert page.run(link) == ["https://example.org/a_(b)", "noopener noreferrer", "_blank"]


def test_markdown_cannot_inject(fake_page: Browser, engine: FakeEngine) -> None:
    page = fake_page
    _say(page, engine, HOSTILE)
    found = set(page.run("return [...document.querySelectorAll('.text *')].map((one) => one.localName)"))
    known = "p a code pre div span button table thead tbody tr th td"
    assert found == set(known.split())
    links = page.run("return [...document.querySelectorAll('.text a')].map((one) => one.href)")
    assert {link.partition(":")[0] for link in links} == {"https"}
    attributes = "return [...document.querySelectorAll('.text *')].flatMap((one) => one.getAttributeNames())"
    assert not [name for name in page.run(attributes) if name.startswith("on") or name in ("src", "srcdoc", "id")]
    page.run("for (const one of document.querySelectorAll('.text a')) one.dispatchEvent(new MouseEvent('mouseover'))")
    assert page.run("return window.hit ?? null") is None
    assert '<script>window.hit=10</script><img src=x onerror="window.hit=11">' in _shown(page, "pre")[0]
    assert "[one](javascript:window.hit=4)" in _shown(page, "p")[1]
    # The same text as a message, and as reasoning, is text.
    page.run("document.querySelector('#text').value = arguments[0]", HOSTILE)
    page.click("send")
    page.until(lambda: page.run("return running === null && conversation.length") == 2, "no answer ended")
    assert page.run("return document.querySelectorAll('.user > p *').length") == 0
    assert page.run("return window.hit ?? null") is None
    assert page.logged() == []


@pytest.mark.parametrize(
    "text", ["*a _b ", "` `` ", "[a](", "- ", "> ", "|-", "http://", "**a *b __c ", "- a\n", "~~~`\n"]
)
def test_no_text_holds_the_page_up(fake_page: Browser, text: str) -> None:
    script = (
        "const box = document.createElement('div'), began = performance.now(); showMarkdown(box, arguments[0]);"
        "return [performance.now() - began, box.textContent.length]"
    )
    took_ms, length = fake_page.run(script, text * 10_000 + "x")
    assert took_ms < 2000
    assert length >= 1


def test_code_is_copied(fake_page: Browser, engine: FakeEngine) -> None:
    page = fake_page
    _say(page, engine, MARKDOWN)
    page.run("document.querySelector('.code button').focus()")
    page.press("\n")
    page.shows(".code button", "Copied")
    page.run("document.querySelector('#text').focus()")
    page.chord(CONTROL, "v")
    page.until(lambda: page.run("return document.querySelector('#text').value"), "nothing was copied")
    assert page.run("return document.querySelector('#text').value") == 'if a < b and "</code>":\n    print("`")'


def test_the_keyboard_alone(fake_page: Browser, engine: FakeEngine) -> None:
    page = fake_page
    page.run("document.querySelector('#text').focus()")
    page.press("a")
    page.chord(SHIFT, "\n")
    page.press("b", "\n")
    page.until(lambda: page.run("return running === null && conversation.length"), "no answer ended")
    assert page.run("return conversation[0].text") == "a\nb"
    page.run("document.querySelector('#new').focus()")
    seen = []
    for _ in range(40):
        where = (
            "const one = document.activeElement; return [one.id || one.ariaLabel, getComputedStyle(one).outlineStyle]"
        )
        seen.append(tuple(page.run(where)))
        page.press(TAB)
        if page.run("return ['new', ''].includes(document.activeElement.id)") and len(seen) > 20:
            break
    reached = [name for name, _ in seen]
    expected = ["new", "settings", "dark", "key", "chat", "Edit this message", "Copy answer"]
    expected += ["Retry: answer this message again", "text", "send", "system", "temperature", "top_p", "max_tokens"]
    assert [name for name in reached if name in expected][: len(expected)] == expected
    assert {style for _, style in seen[1:15]} <= {"solid"}


def test_a_screen_reader_is_told_names_and_whole_answers(fake_page: Browser, engine: FakeEngine) -> None:
    page = fake_page
    watch = (
        "window.told = [];"
        "new MutationObserver(() => told.push(document.querySelector('#announced').textContent))"
        ".observe(document.querySelector('#announced'), {childList: true})"
    )
    page.run(watch)
    _say(page, engine, MARKDOWN)
    page.until(lambda: page.run("return told.length"), "nothing was announced")
    assert page.run("return told") == [f"Answer: {MARKDOWN}"]
    assert page.run("return document.querySelector('#chat').closest('[aria-live]')") is None
    controls = page.names("button, input, textarea, [tabindex='0']:not(pre), aside, form, svg, [role=status]")
    unnamed = [role for role, name in controls if not name]
    assert unnamed == ["status", "status"]  # their texts are what is read
    roles = [role for role, _ in page.names("header, main, aside, #dark, #settings, #chat")]
    assert roles == ["banner", "button", "switch", "main", "region", "complementary"]


# The least contrast of a text with what is behind it, and the text. Controls that are off need none.
CONTRAST = """
const style = (one) => getComputedStyle(one), shades = (color) => color.match(/[\\d.]+/g).map(Number);
const linear = (shade) => shade <= .04045 ? shade / 12.92 : ((shade + .055) / 1.055) ** 2.4;
const luminance = ([red, green, blue]) =>
  .2126 * linear(red / 255) + .7152 * linear(green / 255) + .0722 * linear(blue / 255);
const behind = (one) => {
  const found = shades(style(one).backgroundColor);
  return found[3] === 0 ? behind(one.parentElement) : found;
};
const contrast = (one) => {
  const [dark, light] = [luminance(shades(style(one).color)), luminance(behind(one))].sort((a, b) => a - b);
  return (light + .05) / (dark + .05);
};
const hasText = (one) => [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
const texts = [...document.querySelectorAll("body *")].filter(
  (one) => !one.disabled && one.checkVisibility() && hasText(one));
const found = texts.map((one) => [contrast(one), one.textContent]).sort(([a], [b]) => a - b);
return [found.length, ...found[0]];
"""


def _dark(page: Browser) -> bool:
    color = page.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    [(role, name)] = page.names("#dark")
    assert (role, name) == ("switch", "Dark mode")
    is_dark = sum(color) < 200
    assert page.run("return document.querySelector('#dark').getAttribute('aria-checked')") == str(is_dark).lower()
    return is_dark


def test_light_and_dark(fake_page: Browser, engine: FakeEngine) -> None:
    page = fake_page

    def prefers(theme: str) -> None:
        page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    try:
        _say(page, engine, MARKDOWN)
        page.run("document.querySelector('#chat').append(make('p', {class: 'error'}, 'It is wrong.'))")
        for theme in ("light", "dark"):
            prefers(theme)
            page.until(lambda theme=theme: _dark(page) == (theme == "dark"), f"it is not {theme}")
            texts, least, text = page.run(CONTRAST)
            assert texts > 30
            assert least >= 4.5, (theme, text)
        page.click("dark")
        assert not _dark(page)
        page.run("location.reload()")
        page.shows("#model", "reader")
        assert not _dark(page)
        page.click("dark")
        assert _dark(page)
    finally:
        page.run("localStorage.clear()")
        page.devtools("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize("width", [1440, 900, 768, 360])
def test_it_fits_the_window_and_loads_nothing_else(page: Browser, width: int, tmp_path: Path) -> None:
    page.devtools("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    page.logged()
    page.type("text", "A" * 60 + "\n")
    page.shows(".figures", "reused")
    page.run("const [one] = conversation; one.answer = arguments[0]; showAnswer(one)", MARKDOWN * 3 + "B" * 300)
    page.run("change(conversation, [exchange('Below the end of the window.')], [])")
    box: Any = page.run(
        "const {scrollWidth, scrollHeight} = document.documentElement, {scrollWidth: inner, clientWidth} = $('chat');"
        "const stop = document.getElementById('stop').getBoundingClientRect();"
        "return [scrollWidth, scrollHeight, inner - clientWidth, stop.right, stop.bottom]"
    )
    assert box[:3] == [width, 800, 0]
    assert box[3] <= width
    assert box[4] <= 800
    is_wide = width > 800
    page.until(lambda: page.run("return $('panel').checkVisibility()") == is_wide, "the panel is not as it should be")
    if not is_wide:
        page.click("settings")
        assert page.run("return document.activeElement.id") == "system"
        assert page.run("return $('panel').getBoundingClientRect().right") == width
        assert page.run("return [$('chat').inert, $('form').inert]") == [True, True]
        page.press(ESCAPE)
        assert page.run("return [$('panel').hidden, $('form').inert, document.activeElement.id]") == [
            True,
            False,
            "settings",
        ]
    assert (
        page.run(
            "return performance.getEntriesByType('resource').filter((one) => !one.name.startsWith(origin)).length"
        )
        == 0
    )
    assert page.logged() == []
