"""Run JavaScript in Node, and pages in a headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=5000",
    "--dump-dom",
]


def evaluate(script: str, folder: Path):
    """The value of the expression at the end of a script, by Node or else by Chromium."""
    code, expression = script.rsplit("\n", 1)
    if NODE is not None:
        program = f"{code}\nconsole.log(JSON.stringify({expression}))"
        done = subprocess.run(
            [NODE, "-"], input=program, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    page = folder / "script.html"
    page.write_text(
        f"<pre id=result></pre><script>{code}\n"
        f"document.getElementById('result').textContent = JSON.stringify({expression})</script>"
    )
    return result(page)


def result(page: Path):
    """What the script of a page has written as JSON into its element `result`."""
    if CHROMIUM is None:
        pytest.skip("neither node nor chromium is installed")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    done = subprocess.run(
        [CHROMIUM, *FLAGS, profile, page.as_uri()], capture_output=True, text=True, timeout=120
    )
    found = re.search(r'<pre id="?result"?>(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-500:]
    assert found[1], "the script of the page did not end"
    return json.loads(unescape(found[1]))
