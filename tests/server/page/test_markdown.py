"""Replies as elements: what Markdown becomes, and what hostile text does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.slow
RENDER = """(async (text) => {
  const { blocks, render } = await import('/page/markdown.js');
  const box = document.createElement('div');
  box.append(...blocks(text).map((block) => render(block)));
  for (const head of box.querySelectorAll('.code-head')) head.remove();
  return box.innerHTML.replaceAll(' target="_blank" rel="noopener noreferrer"', '').replaceAll(' tabindex="0"', '');
})"""
CASES = {
    "a **b** *c* `d*e*` 2 * 3 * 4": "<p>a <strong>b</strong> <em>c</em> <code>d*e*</code> 2 * 3 * 4</p>",
    "snake_case and __init__": "<p>snake_case and __init__</p>",
    r"\*not\* and \`not\`": "<p>*not* and `not`</p>",
    "``a ` b``": "<p><code>a ` b</code></p>",
    "# One\ntwo\n\nthree": "<h3>One</h3><p>two</p><p>three</p>",
    "text\n- a\n- b\n  1. c\n  2. d\n- e":
        "<p>text</p><ul><li>a</li><li>b<ol start=\"1\"><li>c</li><li>d</li></ol></li><li>e</li></ul>",
    "3. c\n4. d": '<ol start="3"><li>c</li><li>d</li></ol>',
    "```py\nx = '<b>'\n\n# no heading\n```\nafter":
        "<div class=\"code\"><pre><code>x = '&lt;b&gt;'\n\n# no heading</code></pre></div><p>after</p>",
    "```\nnot closed": '<div class="code"><pre><code>not closed</code></pre></div>',
    "~~~~\n```\n~~~~": '<div class="code"><pre><code>```</code></pre></div>',
    "| a | b |\n|---|:-:|\n| 1 | `2` |": '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
        "<tbody><tr><td>1</td><td><code>2</code></td></tr></tbody></table></div>",
    "> a\n> b": "<blockquote><p>a\nb</p></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "see https://example.org/a_b_(c).": '<p>see <a href="https://example.org/a_b_">https://example.org/a_b_</a>(c).</p>',
    "[x](https://example.org)": '<p><a href="https://example.org">x</a></p>',
    "[x](javascript:alert(1)) ![y](data:image/png;base64,AA)":
        "<p>[x](javascript:alert(1)) ![y](data:image/png;base64,AA)</p>",
    "![y](https://example.org/pixel.png)": '<p><a href="https://example.org/pixel.png">y</a></p>',
    '<img src=x onerror="alert(1)"> &amp; <b>': '<p>&lt;img src=x onerror="alert(1)"&gt; &amp;amp; &lt;b&gt;</p>',
    "": "",
}  # fmt: skip


def test_markdown(open_page: Any, talking: Any) -> None:
    tab = open_page(talking)
    for text, wanted in CASES.items():
        assert tab.js(f"{RENDER}({json.dumps(text)})") == wanted, text
    assert tab.complaints() == []


PIECES = (
    "*", "`", "**a", "[", "[a](", "|-", "- ", "> ", "\\", "#", "*a ", "a*", "_", "~~~", "``` ", "https://a", "**a*b",
    " - a\n  ", "`a``",
)  # fmt: skip
TIMED = (
    "(async () => { const began = performance.now(); await %s(%s.repeat(5000)); return performance.now() - began; })()"
)


def test_odd_text_takes_no_time_to_speak_of(open_page: Any, talking: Any) -> None:
    """A pattern that goes back and forth over a long line would stop the page."""
    tab = open_page(talking)
    took = {piece: tab.js(TIMED % (RENDER, json.dumps(piece))) for piece in PIECES}
    assert max(took.values()) < 3000, took
