"""The docs site and a lesson in a real browser: Chromium without a window, JupyterLab with a real kernel."""
import functools
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import ROOT
from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
LESSON_SECONDS = 300


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install --no-install-recommends chromium)")
    with sync_playwright() as p:
        instance = p.chromium.launch(executable_path=path, args=FLAGS)
        yield instance
        instance.close()


@pytest.fixture(scope="module")
def docs_address(docs_folder):
    "The site, served as a web server would."
    handler = functools.partial(type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *a: None}),
                                directory=str(docs_folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def watch(page):
    "The errors a page reports while it loads: console, exceptions, and files of ours that are missing."
    errors = []
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("response", lambda r: errors.append(f"{r.status} {r.url}") if r.status >= 400 else None)
    return errors


def refuse_other_hosts(page, address):
    "A page must be whole without the network: MathJax and the like from elsewhere are answered with nothing."
    page.route("**/*", lambda route: route.continue_() if route.request.url.startswith((address, "data:", "blob:"))
               else route.fulfill(status=200, body="", content_type="text/javascript"))


@pytest.mark.parametrize("name", ["index.html", "core.html", "ops.html"])
@pytest.mark.parametrize("width", [390, 1280])
def test_docs_page(browser, docs_address, tmp_path, name, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    errors = watch(page)
    refuse_other_hosts(page, docs_address)
    page.goto(f"{docs_address}/{name}", wait_until="load")
    page.screenshot(path=tmp_path / f"{name}-{width}.png")
    main = page.locator("main")
    assert len(main.inner_text()) > 500 and main.locator("h1, h2, h3").count() > 1
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    page.close()
    assert errors == []
    assert overflow <= 1, f"{name} is {overflow} px wider than a {width} px window"


# ---------------------------------------------------------------- JupyterLab

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def lab_settings(folder):
    "Settings under which every cell is in the page (no windowing) and no news is fetched."
    for plugin, values in {"notebook-extension/tracker": {"windowingMode": "none"},
                           "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}.items():
        file = folder / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))


def wait_for(address, process, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            return urllib.request.urlopen(address, timeout=2).close()
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"JupyterLab does not answer on {address} (exit code {process.poll()})")


@pytest.fixture
def lab(tmp_path):
    "JupyterLab on an empty folder: (its address, the folder)."
    work, port = tmp_path / "work", free_port()
    work.mkdir()
    lab_settings(tmp_path / "settings")
    env = {**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"), "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
           "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
           "OMP_NUM_THREADS": "2"}
    env.pop("MPLBACKEND", None)
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", f"--port={port}", "--ServerApp.port_retries=0", "--allow-root",
               "--IdentityProvider.token=", "--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={work}"]
    with open(tmp_path / "lab.log", "w") as log:
        process = subprocess.Popen(command, cwd=work, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(f"http://127.0.0.1:{port}/api", process)
        yield f"http://127.0.0.1:{port}", work
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def run_all_cells(page, address, name):
    "Open a notebook, Run All from the menu, wait until nothing is waiting or running, and save."
    page.goto(f"{address}/lab/tree/{name}", wait_until="load")
    page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for(timeout=90_000)
    # The indicator beside the notebook says idle before there is a kernel; the status bar does not.
    page.locator("#jp-main-statusbar", has_text="| Idle").wait_for(timeout=90_000)
    page.locator(".lm-MenuBar-item", has_text="Run").first.click()
    page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()
    page.wait_for_function("""() => {
        const cells = [...document.querySelectorAll('.jp-NotebookPanel .jp-CodeCell')].filter(c => c.querySelector('.cm-content').innerText.trim());
        const done = c => /^\\[\\d+\\]:$/.test(c.querySelector('.jp-InputPrompt').innerText.trim());
        const failed = document.querySelector('.jp-RenderedText[data-mime-type="application/vnd.jupyter.error"]');
        return failed || (cells.length && cells.every(done));
    }""", timeout=LESSON_SECONDS * 1000)
    page.keyboard.press("Control+s")


def executed(path, seconds=20):
    "The notebook as JupyterLab saved it when every cell had run (an autosave may come earlier), with the outputs."
    end = time.monotonic() + seconds
    while True:
        cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code" and "".join(c["source"]).strip()]
        if all(c["execution_count"] for c in cells) or time.monotonic() > end:
            return cells
        time.sleep(0.5)


def open_lesson(browser, lab, name):
    "Run a copy of a lesson in JupyterLab, without the outputs that were committed: (page, the copy)."
    address, work = lab
    lesson = next((ROOT / "nbs" / "lessons").glob(f"{name}_*.ipynb"))
    copy = work / "nbs" / "lessons" / lesson.name                       # where its records are, as in the repository
    copy.parent.mkdir(parents=True)
    (work / "benchmarks").symlink_to(ROOT / "benchmarks")
    cells = json.loads(lesson.read_text())
    for cell in cells["cells"]:  # what is seen afterwards was made by this run
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    copy.write_text(json.dumps(cells))
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    run_all_cells(page, address, copy.relative_to(work))
    return page, copy


def check_outputs(copy):
    "No error, every cell run, and a picture."
    done = executed(copy)
    errors = [o["evalue"] for c in done for o in c["outputs"] if o["output_type"] == "error"]
    assert errors == []
    assert [c["source"] for c in done if c["execution_count"] is None] == []
    assert any("image/png" in o.get("data", {}) for c in done for o in c["outputs"]), "the lesson shows no picture"


def test_lesson_runs_in_jupyterlab(browser, lab, tmp_path):
    page, copy = open_lesson(browser, lab, "L01")
    page.screenshot(path=tmp_path / "lesson.png")
    check_outputs(copy)
    page.close()


def test_sliders_move_the_faces(browser, lab, tmp_path):
    "L09: the picture beside the sliders changes when one is moved with the keyboard, as by a person."
    page, copy = open_lesson(browser, lab, "L09")
    check_outputs(copy)
    picture = page.locator(".jp-OutputArea-output .widget-image").first
    before = picture.get_attribute("src")
    page.locator(".widget-slider [role=slider], .widget-slider .noUi-handle").first.press("ArrowRight")
    page.wait_for_function("old => document.querySelector('.jp-OutputArea-output .widget-image').src != old", arg=before, timeout=60_000)
    picture.scroll_into_view_if_needed()
    page.screenshot(path=tmp_path / "sliders.png")
    page.close()
