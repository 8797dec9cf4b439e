"""The page as a person uses it, in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.config.settings import HttpSettings
from dgpp_core.server.keys import hashed
from dgpp_core.testing.fake_worker import FakeFault, FakeReply, FakeScript

pytestmark = pytest.mark.slow
LAST = "#messages > li:last-child"
WINDOWS = {"desktop": (1280, 800), "phone": (390, 844)}


def ask(tab: Any, text: str) -> None:
    tab.wait("document.activeElement.id === 'prompt' || (document.getElementById('prompt').focus(), true)")
    tab.wait("document.querySelector('#model').textContent")
    tab.type(text)
    tab.press("Enter")


def complete(tab: Any) -> None:
    tab.wait(f"document.querySelector('{LAST}.reply') && !document.querySelector('.live')")


def check_layout(tab: Any) -> None:
    """Nothing sticks out sideways, no text is too faint to read, every control has a name."""
    assert tab.js("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    assert tab.js(FAINT) == []
    assert unnamed(tab) == []
    assert tab.complaints() == []
    assert tab.requests()
    assert [url for url in tab.requests() if not url.startswith((tab.url, "about:", "data:"))] == []


FAINT = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const channels = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const owner = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !owner.checkVisibility({visibilityProperty: true})) continue;
    if (owner.closest('.hidden, .skip, :disabled, noscript, option')) continue;
    let back = owner;
    while (back && channels(getComputedStyle(back).backgroundColor)[3] < 255) back = back.parentElement;
    const [a, b] = [getComputedStyle(owner).color, getComputedStyle(back ?? document.body).backgroundColor]
      .map((color) => light(channels(color))).sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) found.push(walker.currentNode.data.trim().slice(0, 40));
  }
  return found;
})()"""
"""Visible texts whose contrast is below 4.5 to 1 (WCAG 2.2, 1.4.3)."""


def unnamed(tab: Any) -> list[str]:
    """Controls that a screen reader would have no name for."""
    nodes = tab.driver.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "combobox", "tab", "tabpanel", "checkbox", "link", "progressbar"}
    return [
        str(node) for node in nodes
        if not node["ignored"] and node["role"]["value"] in roles and not node.get("name", {}).get("value")
    ]  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_welcome_reply_and_panel(open_page: Any, talking: Any, shots: Path, window: str, dark: bool) -> None:
    name = f"{window}-{'dark' if dark else 'light'}"
    width, height = WINDOWS[window]
    tab = open_page(talking, width=width, height=height, dark=dark)
    tab.wait("document.querySelector('#model').textContent && document.querySelector('#slots').textContent !== '-'")
    check_layout(tab)
    tab.screenshot(shots / f"{name}-1-welcome.png")
    ask(tab, "Please merge two lists")
    tab.wait(f"document.querySelector('{LAST} .prose pre')")
    tab.screenshot(shots / f"{name}-2-midstream.png")
    check_layout(tab)
    complete(tab)
    tab.screenshot(shots / f"{name}-3-complete.png")
    check_layout(tab)
    assert tab.js("document.title") == "demo-model-9b - dgpp"  # a reply's script is text
    assert tab.js(f"[...document.querySelectorAll('{LAST} .prose > *')].map((e) => e.tagName).join(' ')") == (
        "P H4 OL DIV DIV BLOCKQUOTE"
    )
    assert "<script>" in tab.text(f"{LAST} blockquote")
    assert tab.js(f"document.querySelector('{LAST} .prose a').href") == "https://example.org/a"
    assert tab.text(f"{LAST} pre").startswith("def merge(a, b):\n    out = []")
    assert tab.js(f"document.querySelector('{LAST} details').open") is False
    assert tab.text(f"{LAST} summary").startswith("Thought for ")
    tab.click(f"{LAST} summary")
    assert "I compare the heads" in tab.text(f"{LAST} .thoughts")
    assert " tokens · " in tab.text(f"{LAST} .cost")
    assert "3 of it cached" in tab.text(f"{LAST} .cost")
    if window == "phone":
        tab.click("#panel-open")
        tab.wait("document.activeElement.id === 'tab-status'")
    check_layout(tab)
    tab.screenshot(shots / f"{name}-4-status.png")
    tab.js("document.getElementById('tab-status').focus()")
    tab.press("ArrowRight")
    assert tab.js("document.activeElement.id") == "tab-settings"
    tab.wait("!document.querySelector('#settings').hidden")
    check_layout(tab)
    tab.screenshot(shots / f"{name}-5-settings.png")
    if window == "phone":
        tab.press("Escape")
        tab.wait("getComputedStyle(document.querySelector('#panel')).visibility === 'hidden'")
        assert tab.js("document.activeElement.id") == "panel-open"


def test_the_status_view_shows_the_metrics(open_page: Any, talking: Any) -> None:
    tab = open_page(talking)
    tab.wait("document.querySelector('#slots').textContent !== '-'")
    assert tab.text("#slots") == "0 of 8"
    assert tab.text("#queue") == "0"
    assert tab.text("#kv-text") == "37.1 % held, 22.5 % kept, 1,024 blocks"
    widths = tab.js("[...document.querySelectorAll('#kv span')].map((e) => parseFloat(e.style.width))")
    assert widths == pytest.approx([100 * 380 / 1024, 100 * 230 / 1024], abs=0.01)
    assert tab.text("#cache-hits") == "41 of 50"
    assert tab.text("#cache-saved") == "53,500 (66.0 %)"
    assert tab.text("#drafts-text") == "67.5 % of them stood"
    assert tab.js("[...document.querySelectorAll('#drafts dd')].map((e) => e.innerText)") == [
        "87.0 %",
        "67.8 %",
        "47.8 %",
    ]
    assert "41,000 of 65,536 tokens, 12,288 cached" in tab.text("#prefill")
    ask(tab, "slowly")
    tab.wait("document.querySelector('#slots').textContent === '1 of 8'")
    tab.wait("Number(document.querySelector('#rate').textContent.replace(',', '')) > 0")
    assert tab.text("#health-text") == "1 running"
    tab.press("Escape")
    tab.wait("document.querySelector('#slots').textContent === '0 of 8'")


def test_a_tool_call_is_shown_and_answered(open_page: Any, talking: Any, shots: Path) -> None:
    for width, dark in ((1280, False), (390, True)):
        tab = open_page(talking, width=width, dark=dark)
        tab.wait("document.querySelector('#model').textContent")
        tab.js("document.getElementById('tools-example').click()")
        ask(tab, "weather")
        complete(tab)
        check_layout(tab)
        tab.screenshot(shots / f"tool-call-{width}.png")
        assert tab.text(f"{LAST} .call-name") == "get_weather"
        assert json.loads(tab.text(f"{LAST} .call > pre")) == {"city": "Nürnberg", "days": 2, "units": ["celsius"]}
        assert "waits for results" in tab.text(f"{LAST} .cost")
        tab.click(f"{LAST} .call textarea")
        tab.type("19 degrees")
        tab.click(f"{LAST} .foot .primary")
        tab.wait("document.querySelectorAll('#messages > li').length === 3")
        complete(tab)
        check_layout(tab)
        tab.screenshot(shots / f"tool-result-{width}.png")
        assert tab.text(f"{LAST} .prose strong") == "19 degrees"
        assert tab.text(".call-result pre") == "19 degrees"
        assert "waits" not in tab.text("#messages")


def test_stop_scroll_and_reload(open_page: Any, talking: Any) -> None:
    tab = open_page(talking)
    ask(tab, "slowly")
    tab.wait(f"document.querySelector('{LAST} .prose')?.innerText.length > 2000")
    box = "document.querySelector('#scroll')"
    tab.wait(f"{box}.scrollHeight > {box}.clientHeight + 200")
    tab.wait(f"{box}.scrollHeight - {box}.scrollTop - {box}.clientHeight < 60")
    tab.js(f"{box}.scrollTop = 0")
    tab.wait("!document.querySelector('#to-end').hidden")
    tab.js("new Promise((done) => setTimeout(done, 150))")
    assert tab.js(f"{box}.scrollTop") == 0  # a reader who looks back is left there
    tab.click("#to-end")
    tab.wait(f"{box}.scrollHeight - {box}.scrollTop - {box}.clientHeight < 60")
    tab.click("#stop")
    complete(tab)
    assert tab.text(f"{LAST} .cost").startswith("stopped")
    talking.await_idle()
    before = tab.text(f"{LAST} .prose")
    tab.go()
    assert tab.text(f"{LAST} .prose") == before
    tab.click(f"{LAST} .foot button:last-of-type")
    tab.wait("document.querySelector('.live')")
    tab.press("Escape")
    complete(tab)
    tab.click("#new-chat")
    assert tab.js("document.querySelectorAll('#messages > li').length") == 0
    assert tab.js("document.activeElement.id") == "prompt"


def test_reasoning_is_folded_while_it_comes(open_page: Any, talking: Any, shots: Path) -> None:
    tab = open_page(talking, dark=True)
    ask(tab, "ponder")
    tab.wait(f"document.querySelector('{LAST} .thoughts')?.textContent.length > 300")
    tab.screenshot(shots / "thinking.png")
    assert tab.text(f"{LAST} summary") == "Thinking …"
    assert tab.text(f"{LAST} .prose") == ""
    before = len(tab.js(f"document.querySelector('{LAST} .thoughts').textContent"))
    tab.click(f"{LAST} summary")
    tab.wait(f"document.querySelector('{LAST} .thoughts').textContent.length > {before + 300}")
    assert tab.js(f"document.querySelector('{LAST} details').open") is True  # what comes does not fold it again
    tab.press("Escape")
    complete(tab)
    assert tab.text(f"{LAST} .cost").startswith("stopped")


def test_settings_reach_the_request(open_page: Any, talking: Any) -> None:
    tab = open_page(talking)
    tab.wait("document.querySelector('[name=temperature]').placeholder === '0.6'")
    tab.click("#tab-settings")
    for name, value in {"temperature": "0.25", "top_k": "7", "seed": "11", "max_tokens": "30"}.items():
        tab.click(f"[name={name}]")
        tab.type(value)
    assert "none" in tab.js("[...document.querySelector('[name=reasoning_effort]').options].map((o) => o.value)")
    ask(tab, "hello")
    complete(tab)
    submit = talking.messages("submit")[-1]
    assert submit["max_tokens"] == 30
    assert submit["params"]["temperature"] == 0.25
    assert (submit["params"]["top_k"], submit["params"]["seed"]) == (7, 11)
    tab.go()
    assert tab.js("document.querySelector('[name=top_k]').value") == "7"
    tab.js("document.querySelector('[name=tools]').value = '{'")
    ask(tab, "again")
    complete(tab)
    assert "Tools: this is not JSON" in tab.text(f"{LAST} .notice")


def test_shift_enter_is_a_new_line(open_page: Any, talking: Any) -> None:
    tab = open_page(talking)
    tab.wait("document.activeElement.id === 'prompt'")
    tab.type("one")
    tab.press("Enter", shift=True)
    tab.type("two")
    assert tab.js("document.querySelector('#prompt').value") == "one\ntwo"
    tab.press("Enter")
    complete(tab)
    assert tab.text(".bubble") == "one\ntwo"


def test_errors_are_shown(open_page: Any, serve_fake: Any, shots: Path) -> None:
    fault = FakeFault(kind="error", after_tokens=8)
    script = FakeScript(replies=(FakeReply(text="blue " * 200),), fault=fault, step_ms=10)
    with serve_fake(script) as running:
        for number, (width, dark) in enumerate(((1280, False), (390, True))):
            tab = open_page(running, width=width, dark=dark)
            ask(tab, "hello" if number == 0 else "word " * 5000)
            complete(tab)
            check_layout(tab)
            tab.screenshot(shots / f"error-{width}.png")
            notice = tab.text(f"{LAST} .notice")
            assert ("The engine gave up this request" if number == 0 else "context_length_exceeded") in notice
        tab.click("#new-chat")
        ask(tab, "hello again")
        tab.wait(f"document.querySelector('{LAST} .prose')?.innerText.length > 20")
    complete(tab)
    assert "No complete reply" in tab.text(f"{LAST} .notice")
    tab.wait("document.querySelector('#health-text').textContent === 'unreachable'")


def test_a_service_with_keys_asks_for_one(open_page: Any, serve_fake: Any, shots: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"sha256:{hashed(b'open sesame').hex()} ali\n")
    with serve_fake(http=HttpSettings(api_key_file=str(tmp_path / "keys"))) as running:
        tab = open_page(running)
        tab.wait("document.querySelector('#key-dialog').open")
        check_layout(tab)
        tab.screenshot(shots / "key-1280.png")
        tab.type("wrong")
        tab.press("Enter")
        tab.wait("document.querySelector('#key-why').innerText.includes('does not know')")
        tab.type("open sesame")
        tab.press("Enter")
        tab.wait("document.querySelector('#health-text').textContent === 'ready'")
        ask(tab, "colors")
        complete(tab)
        assert tab.text(f"{LAST} .prose") == "Red, yellow and blue."
        assert tab.js("[localStorage.getItem('dgpp.key'), sessionStorage.getItem('dgpp.key')]") == [None, "open sesame"]


def test_the_theme_can_be_chosen(open_page: Any, talking: Any) -> None:
    tab = open_page(talking, dark=True)
    color = "getComputedStyle(document.body).backgroundColor"
    dark = tab.js(color)
    tab.click("#theme")
    assert tab.js(color) != dark
    tab.go()
    assert tab.text("#theme") == "Theme: light"
    assert tab.js(color) != dark
    tab.click("#theme")
    assert tab.js(color) == dark
