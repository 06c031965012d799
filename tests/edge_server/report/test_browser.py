"""A real browser draws the page as it is meant, without a word to the network."""

from __future__ import annotations

import json
import shutil
import subprocess  # noqa: TID251 - a browser is no part of ours

import pytest

from edge_server.journal.records import Evaluated
from edge_server.report.page import render_page
from edge_server.report.summarise import digest_run
from tests.edge_server.report.journals import many, parsed, small

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--proxy-server=127.0.0.1:9", "--enable-logging=stderr", "--dump-dom"),
)


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return found


def opened(browser: str, folder, text: str, *options: str) -> tuple[str, list[str], str]:
    """What a browser makes of a page: the document, what the page asked the network for, what was refused it.

    The browser asks for its own updates too; its log says of every request whether a page was its cause. Nothing gets
    out: the proxy it is told to ask is a port of this machine that nobody listens on.
    """
    path, log = folder / "report.html", folder / "net.json"
    path.write_text(text, encoding="utf-8")
    where = (f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", path.as_uri())
    command = [browser, *QUIET, *options, *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    said = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    asked = {one["url"] for one in said if "file:" in one.get("network_isolation_key", "") and "url" in one}
    refused = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return done.stdout, sorted(asked), refused


def test_a_browser_draws_every_point_and_asks_nobody(browser, tmp_path):
    """Two runs of 12 rounds over 3 x 4 charts, and nothing that the page's policy had to refuse."""
    runs = [digest_run(many(6, 12, 6, shift=shift)) for shift in (0, 8)]
    drawn, asked, refused = opened(browser, tmp_path, render_page(runs))
    curves = next(one for one in parsed(drawn).all("section") if one.all("h2")[0].text == "Accuracy and loss")
    assert sum(len(charts.all("path", "point")) for charts in curves.all("div", "charts")) == 2 * 12 * 12
    assert (asked, refused) == ([], "")


def test_the_browser_test_can_see_a_request_and_a_refusal(browser, tmp_path):
    """The other is not blind: a picture in the page is refused by its policy, and asked for where there is none."""
    text, picture = render_page([digest_run(small())]), '<img src="http://x.test/a.png">'
    spoiled = text.replace("</main>", f"{picture}</main>")
    assert "Content Security Policy" in opened(browser, tmp_path, spoiled)[2]
    bare = spoiled.replace("Content-Security-Policy", "nothing")
    assert opened(browser, tmp_path, bare)[1] == ["http://x.test/a.png"]


MEASURE = """<script>document.body.dataset.cut = JSON.stringify(
  [...document.querySelectorAll(".wide")]
    .filter(one => one.scrollWidth > one.clientWidth && !one.closest("details"))
    .map(one => one.closest("section").querySelector("h2").textContent)
    .concat(document.documentElement.scrollWidth > innerWidth ? ["the page"] : []))</script>"""


@pytest.mark.parametrize("width", [1920, 1280, 400])
def test_nothing_of_three_runs_is_cut(browser, tmp_path, width):
    """Runs of personal models, with the names that replays have: the most words that outcomes say.

    Narrow screens move tables sideways inside their boxes; the page itself they never do.
    """
    name = "demo-pruned_personalization-replay-{}c1ff573"
    own = Evaluated(accuracy=0.7, by_device={"a": {"eval_accuracy": 0.75}}, personal=True, round=2)
    runs = [digest_run([*small(run=name.format(number)), own]) for number in range(3)]
    text = render_page(runs).replace("Content-Security-Policy", "nothing").replace("</main>", f"</main>{MEASURE}")
    drawn, _, _ = opened(browser, tmp_path, text, f"--window-size={width},1080")
    [body] = parsed(drawn).all("body")
    cut = json.loads(body.attributes["data-cut"] or "")
    assert cut == [] if width > 1000 else "the page" not in cut
