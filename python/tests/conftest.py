"""What several tests need: a program that stands in for the real one, and the real one for recordings."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from seamproof import program
from seamproof.errors import ProgramMissing

pytest_plugins = ["pytester"]
TESTS = Path(__file__).parent


@pytest.fixture
def fake_program(tmp_path, monkeypatch):
    """Puts the stand-in where the package looks for the program."""
    path = tmp_path / "fake-seamproof"
    path.write_text(
        f"#!{sys.executable}\n"
        + (TESTS / "fake_program.py").read_text().replace("__file__", repr(str(TESTS / "x")))
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("SEAMPROOF", str(path))
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    monkeypatch.chdir(tmp_path)
    return path


@pytest.fixture
def judged():
    """Judges a recording with the real program, and returns the exit code and what was said."""
    try:
        path = program.find()
    except ProgramMissing as missing:
        pytest.skip(str(missing))

    def judge(directory):
        done = subprocess.run([path, "judge-recording", str(directory)], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return judge
