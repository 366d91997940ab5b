"""Runs the tests marked `interpreter` in one child process with TRITON_INTERPRET=1 and passes their outcomes on.

Triton reads that variable when it is imported, and the resource tests need the real compiler in the same run.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

OUTCOMES = "BASE_MOE_INTERPRETER_OUTCOMES"
outcomes = pytest.StashKey[dict]()


def pytest_configure(config):
    config.addinivalue_line("markers", "interpreter: runs in a child process, in the Triton interpreter")


def pytest_runtest_logreport(report):
    if os.environ.get(OUTCOMES) and (report.when == "call" or report.outcome != "passed"):
        with Path(os.environ[OUTCOMES]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, report.longreprtext]) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if pyfuncitem.get_closest_marker("interpreter") is None or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    session = pyfuncitem.session
    if outcomes not in session.stash:
        with tempfile.TemporaryDirectory() as folder:
            session.stash[outcomes] = run_child(session, Path(folder) / "outcomes.jsonl")
    outcome, text = session.stash[outcomes].get(pyfuncitem.nodeid, ("failed", session.stash[outcomes][None]))
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "failed":
        pytest.fail(text, pytrace=False)
    return True


def run_child(session, path):
    nodes = [item.nodeid for item in session.items if item.get_closest_marker("interpreter")]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *nodes],
        cwd=session.config.rootpath,
        env={**os.environ, "TRITON_INTERPRET": "1", OUTCOMES: str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = {
        None: f"the interpreter gave no result for this test; it ended with\n{(child.stdout + child.stderr)[-4000:]}"
    }
    for line in path.read_text().splitlines() if path.exists() else ():
        nodeid, outcome, text = json.loads(line)
        found[nodeid] = (outcome, text)
    return found
