"""`epsilons plan --serve`: what the server answers, refuses and saves, and its page in a browser."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from epsilons.cli import plan as plan_module
from epsilons.cli import plan_inputs
from epsilons.cli.plan_inputs import BudgetFlags, RecipeFlags
from epsilons.planning import Plan
from tests.program import CONFIG, change, epsilons, people

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("httpx", reason="starlette's test client needs httpx")
from starlette.testclient import TestClient

from epsilons.cli import serve

HOST = "127.0.0.1:8000"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(people(400))
    Path("people.toml").write_text(CONFIG)


def client(accountant="pld", **headers):
    change('accountant = "rdp"', f'accountant = "{accountant}"')
    asked = plan_inputs.of_config(Path("people.toml"), BudgetFlags(), RecipeFlags(), [], False)
    served = serve.Served(asked, partial(plan_module._save, output=Path("plan.json")), Path("plan.html"))
    headers = {"x-token": served.token, "origin": f"http://{HOST}", "host": HOST} | headers
    made = TestClient(serve.app(served, HOST), base_url=f"http://{HOST}", headers=headers)
    return made, served.values()["controls"]


def test_untouched_controls_give_what_the_command_prints():
    made, controls = client()
    found = made.post("/plan", json={"controls": controls, "exact": True}).json()
    printed = " ".join(epsilons("plan", "people.toml").out.split())
    texts = [found["title"], *found["notes"], *found["guarantee"].splitlines()]
    for title, headers, rows in found["tables"]:
        texts += [title, *(" ".join(row) for row in [headers, *rows])]
    for text in texts:
        assert " ".join(text.split()) in printed
    fast = made.post("/plan", json={"controls": controls, "exact": False}).json()
    assert "certified by rdp" in fast["title"]
    assert found["own"]
    assert found["verdict"]


def test_a_plan_with_other_steps_batch_and_strategy_is_saved_as_the_command_saves_it():
    made, controls = client()
    controls |= {"steps": 7, "batch_size": 20.0, "strategy": "sample"}
    assert made.post("/save", json={"controls": controls}).status_code == 200
    flags = ["--set", "training.steps=7", "--set", "training.batch_size=20", "--strategy", "sample"]
    epsilons("plan", "people.toml", *flags, "-o", "other.json", "--html", "other.html").succeeded()
    assert Path("plan.json").read_bytes() == Path("other.json").read_bytes()
    assert Path("plan.html").read_bytes() == Path("other.html").read_bytes()
    assert Path("plan.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("moved", [{"epsilon": 1.5}, {"people": 1000.0}])
def test_moved_tiers_change_numbers_and_are_never_saved(moved):
    made, controls = client()
    before = made.post("/plan", json={"controls": controls, "exact": False}).json()
    controls["tiers"][0] |= moved
    found = made.post("/plan", json={"controls": controls, "exact": False}).json()
    assert found["own"] is False
    assert found["tables"] != before["tables"]
    refused = made.post("/save", json={"controls": controls})
    assert refused.status_code == 409
    assert refused.json()["error"] == serve.MOVED
    assert not Path("plan.json").exists()


def test_moved_tiers_keep_their_names_and_kept_plans_are_compared():
    change('column = "epsilon"', 'column = "epsilon"\ntiers = { "1" = 1, "4" = 4 }')
    change('"1" = 1, "4" = 4', '"1" = 0.5, "4" = 2')
    made, controls = client("rdp")
    assert [tier["name"] for tier in controls["tiers"]] == ["1", "4"]
    kept = [made.post("/plan", json={"controls": controls}).json()["tiers"]]
    controls["tiers"][0]["epsilon"] = 1.5
    kept.append(made.post("/plan", json={"controls": controls}).json()["tiers"])
    assert [dict(one["Promised ε"]) for one in kept] == [{"1": "0.5", "4": "2"}, {"1": "1.5", "4": "2"}]
    for one in kept:
        assert {tuple(name for name, _ in cells) for cells in one.values()} == {("1", "4")}
    verdict = made.post("/compare", json={"controls": controls, "plans": kept}).json()["verdict"]
    assert (
        "Right guesses of 100, in whole numbers, are fewest: the same under all for 1 and 4." in verdict
    )  # Scale solves each on its own
    assert "The smallest tier is 1 (" in verdict
    assert "its share of the signal of its plan is smallest under plan A" in verdict
    assert "or more)" not in verdict
    controls["tiers"][0]["people"] += 100
    kept[1] = made.post("/plan", json={"controls": controls}).json()["tiers"]
    counts = [int(dict(one["How many"])["4"]) for one in kept]
    assert counts[0] > counts[1]
    verdict = made.post("/compare", json={"controls": controls, "plans": kept}).json()["verdict"]
    assert f"The smallest tier is 4 ({counts[1]} records or more)" in verdict
    for wrong in (None, [], [3], [{}], [{"How many": 3}], [{"How many": [["a", 3]]}], [*kept, *kept]):
        assert made.post("/compare", json={"controls": controls, "plans": wrong}).status_code == 400, wrong


def test_a_save_replaces_no_other_page():
    made, controls = client()
    Path("plan.html").write_text("mine")
    assert made.post("/save", json={"controls": controls}).status_code == 409
    assert Path("plan.html").read_text() == "mine"
    assert not Path("plan.json").exists()


@pytest.mark.parametrize(
    "headers", [{"x-token": "guess"}, {"x-token": ""}, {"origin": "http://evil.example"}, {"host": "evil.example:8000"}]
)
def test_a_request_of_another_site_is_refused(headers):
    made, controls = client(**headers)
    assert made.post("/plan", json={"controls": controls}).status_code == 403
    assert made.post("/save", json={"controls": controls}).status_code == 403
    assert "origin" in headers or made.get("/").status_code == 403
    assert not Path("plan.json").exists()


def test_a_request_names_no_code_and_bad_controls_get_a_message():
    made, controls = client()
    for wrong in ({"strategy": "os:system"}, {"steps": None}, {"steps": -1}, {"tiers": []}, {"batch_size": 1e9}):
        answered = made.post("/plan", json={"controls": controls | wrong, "exact": False})
        assert answered.status_code == 409, wrong
        assert answered.json()["error"]
    assert made.post("/plan", content="[").status_code == 400


def test_the_page_holds_tiers_with_counts_and_may_load_nothing():
    made, controls = client()
    page = made.get("/")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-")
    assert "access-control-allow-origin" not in page.headers
    assert [tier["epsilon"] for tier in controls["tiers"]] == [1, 4]
    assert not re.findall(r"https?://", page.text)
    assert "internal, confidential" in page.text


def test_rare_budgets_are_neither_sent_nor_moved():
    Path("people.csv").write_text(people(400).replace(",4\n", ",3.7\n", 1))
    made, controls = client()
    assert controls["tiers"] == []
    found = made.post("/plan", json={"controls": controls, "exact": False}).text + made.get("/").text
    assert "3.7" not in found
    assert "Suppressed" in found


def test_serve_needs_a_config():
    epsilons("plan", "--shares", "1:100%", "--records", 99, "--batch-size", 9, "--steps", 9, "--serve").is_refused(
        2, "needs a config"
    )


# -- in a browser ------------------------------------------------------------------------------------------------------


class Page:
    """A page of a headless Chromium, by the DevTools protocol."""

    def __init__(self, socket):
        self.socket, self.ids = socket, itertools.count(1)

    def send(self, method, **params):
        this = next(self.ids)
        self.socket.send(json.dumps({"id": this, "method": method, "params": params}))
        while (got := json.loads(self.socket.recv(timeout=60))).get("id") != this:
            pass
        return got["result"]

    def run(self, script):
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition):
        end = time.monotonic() + 60
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, condition
            time.sleep(0.05)


FINAL = "document.readyState == 'complete' && document.querySelector('#state')?.dataset.exact == 'true' && last"


@pytest.mark.skipif(CHROMIUM is None, reason="NOT CHECKED in a browser: no Chromium")
def test_three_controls_are_moved_compared_saved_and_kept_over_a_reload(tmp_path):
    client_of = pytest.importorskip("websockets.sync.client", reason="NOT CHECKED in a browser: no websockets")
    change('accountant = "rdp"', 'accountant = "pld"')
    command = [sys.executable, "-m", "epsilons", "plan", "people.toml", "--serve", "-o", "plan.json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    url = server.stdout.readline().strip()
    profile = tmp_path / "profile"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    browser = subprocess.Popen([CHROMIUM, *flags, url], stderr=subprocess.DEVNULL)
    try:
        port_file = profile / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text()):
            assert time.monotonic() < end
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        tabs = []
        while not tabs:
            listed = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
            tabs = [tab for tab in listed if tab["type"] == "page" and tab["url"].startswith(url[:20])]
            assert time.monotonic() < end
        with client_of.connect(tabs[0]["webSocketDebuggerUrl"], max_size=None) as socket:
            page = Page(socket)
            page.wait(FINAL)
            page.run("document.querySelector('#keep').click()")
            for name, value in (("steps", 7), ("expected batch", 20)):
                field = f"document.querySelector('[aria-label=\"{name}\"]')"
                page.run(f"{field}.value = {value}; {field}.oninput()")
            page.run("strategy = document.querySelector('#strategy'); strategy.value = 'sample'; strategy.onchange()")
            page.wait(FINAL)
            page.run("document.querySelector('#keep').click()")
            page.wait("document.querySelector('#versus').textContent.startsWith('Right guesses of 100')")
            shown = page.run("document.querySelector('#tables').innerText")
            assert page.run("document.querySelector('#cells tbody th').textContent") == "1"
            assert "certified by pld" in page.run("document.querySelector('#title').textContent")
            flags = ["--set", "training.steps=7", "--set", "training.batch_size=20", "--strategy", "sample"]
            epsilons("plan", "people.toml", *flags, "-o", "other.json", "--html", "other.html").succeeded()
            for row in plan_module.planning.display.phase_tables(Plan.load(Path("other.json")))[0][1][1]:
                assert all(cell in shown for cell in row)
            page.run("document.querySelector('#save').click()")
            page.wait("document.querySelector('#state').textContent.startsWith('Saved')")
            assert Path("plan.json").read_bytes() == Path("other.json").read_bytes()
            assert Path("plan.html").read_bytes() == Path("other.html").read_bytes()
            before = page.run("document.querySelector('#side').innerText")
            page.send("Page.reload")
            time.sleep(0.5)
            page.wait(FINAL)
            assert page.run("document.querySelector('#side').innerText") == before
            assert page.run("document.querySelector('#tables').innerText") == shown
            field = "document.querySelector('[aria-label=\"ε of tier 1\"]')"
            page.run(f"{field}.value = 1.5; {field}.oninput()")
            page.wait(FINAL)
            assert page.run("document.querySelector('#save').disabled && !document.querySelector('#moved').hidden")
            for width in (1280, 390):
                page.send(
                    "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
                )
                assert page.run("document.documentElement.scrollWidth") <= width
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0
    finally:
        for process in (browser, server):
            process.kill()
            process.wait()
