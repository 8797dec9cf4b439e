"""A page of another site in a real browser, which does what it can without asking first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow


class _Blank(BaseHTTPRequestHandler):
    """An empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>other</title>")

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def other_site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Blank) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()
        thread.join()


def act(url: str) -> str:
    """Upload a file and ask for a reply in two dialects; the statuses, 0 where the browser hides the answer."""
    return f"""(async () => {{
        const form = new FormData();
        form.append("purpose", "user_data");
        form.append("file", new Blob(["planted"]), "planted.txt");
        const model = "demo-model-9b";
        const chat = JSON.stringify({{model, messages: [{{role: "user", content: "colors"}}]}});
        const answer = JSON.stringify({{model, input: "colors"}});
        const bodies = {{"/v1/files": form, "/v1/chat/completions": chat, "/v1/responses": answer}};
        const found = [];
        for (const [path, body] of Object.entries(bodies)) {{
            found.push((await fetch({url!r} + path, {{method: "POST", mode: "no-cors", body}})).status);
        }}
        return found;
    }})()"""


def test_a_page_of_another_site_plants_nothing_and_costs_nothing(talking: Any, open_page: Any, other_site: str) -> None:
    tab = open_page(talking)
    asked, refused = len(talking.messages("submit")), talking.metrics()["service"]["rejects_bad"]
    tab.driver.call("Page.navigate", url=other_site)
    tab.wait("document.title === 'other'")
    assert tab.js(act(talking.url)) == [0, 0, 0]
    assert httpx.get(talking.url + "/v1/files").json()["data"] == []
    assert len(talking.messages("submit")) == asked
    assert talking.metrics()["service"]["rejects_bad"] == refused + 3
    tab.go()
    assert tab.js(act(talking.url)) == [200, 200, 200], "the same from a page of our own"
    (kept,) = httpx.get(talking.url + "/v1/files").json()["data"]
    assert kept["filename"] == "planted.txt"
    assert len(talking.messages("submit")) == asked + 2
    assert httpx.delete(f"{talking.url}/v1/files/{kept['id']}").status_code == 200
