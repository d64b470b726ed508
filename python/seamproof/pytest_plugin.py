"""The pytest plugin: a marker, a fixture, and two options.

```python
@pytest.mark.seamproof(cases=2000, profile="quick")
def test_windows(seamproof):
    seamproof.check(attention, masks="window")
```

`--seamproof-budget=5m` overrules the budget of every check, and `--seamproof-replay=FILE` judges a stored case instead
of drawing any. The marker also holds for checks that do not use the fixture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from .errors import DeviceLost, OtherSubject

MARKER = "seamproof"


class Checker:
    """What the fixture gives: `check`, as `seamproof.check`."""

    def check(self, kernel: Any, **arguments: Any) -> Any:
        """Checks a kernel; see `seamproof.check`."""
        from .checking import check

        return check(kernel, **arguments)


@pytest.fixture
def seamproof() -> Checker:
    """Checks kernels with the options of the command line and of the test's marker."""
    return Checker()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("seamproof", "checks of attention kernels")
    group.addoption("--seamproof-budget", metavar="TIME", help="budget of every check, as 20s or 5m")
    group.addoption(
        "--seamproof-replay", metavar="FILE", help="judge this stored case instead of drawing any"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(cases, profile, budget, seed, strict, isolate, …): arguments of the test's checks",
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Sets what the checks of a test are given, and skips those that have no device left."""
    from . import checking

    marker = item.get_closest_marker(MARKER)
    before = checking.forced, checking.marked
    try:
        checking.forced = _forced(item.config)
        checking.marked = _settings(dict(marker.kwargs) if marker else {})
        outcome = yield
    finally:
        checking.forced, checking.marked = before
    error = outcome.excinfo[1] if outcome.excinfo is not None else None
    if isinstance(error, (DeviceLost, OtherSubject)):
        why = "the GPU was lost in an earlier test" if isinstance(error, DeviceLost) else str(error)
        outcome.force_exception(pytest.skip.Exception(why, _use_item_location=True))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says once that a GPU was lost."""
    from . import checking

    if checking.lost is not None:
        terminalreporter.section("seamproof")
        terminalreporter.write_line(
            f"A kernel left the GPU in error: {checking.lost}\nEvery later check on the GPU was skipped. Start pytest "
            "anew without that test, or give its check isolate=True, which runs the kernel in a process of its own."
        )


def _forced(config: pytest.Config) -> Any:
    replay = config.getoption("--seamproof-replay")
    return _settings({"budget": config.getoption("--seamproof-budget"), "replay": replay})


def _settings(given: dict[str, Any]) -> Any:
    """Returns settings; words that are none of theirs narrow what a kernel is asked."""
    from .checking import Settings

    known = {field.name for field in dataclasses.fields(Settings)} - {"narrowing"}
    narrowing = {name: value for name, value in given.items() if name not in known}
    return Settings(**{name: value for name, value in given.items() if name in known}, narrowing=narrowing)
