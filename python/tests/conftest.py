"""What several tests need: a program that stands in for the real one."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

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
