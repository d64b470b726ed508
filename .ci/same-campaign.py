"""Compares the folders of two campaigns, apart from what depends on the clock: their events and their findings."""

import json
import pathlib
import sys


def events(folder):
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        yield {name: value for name, value in event.items() if name not in ("times", "jobs")}


def findings(folder):
    return {path.name: path.read_text() for path in (folder / "findings").iterdir()}


one, other = map(pathlib.Path, sys.argv[1:])
for got, expected in zip(events(one), events(other)):
    if got != expected:
        sys.exit(f"{got}\nin the place of\n{expected}")
if len(list(events(one))) != len(list(events(other))):
    sys.exit("one has more events")
if not findings(one) or findings(one) != findings(other):
    sys.exit(f"findings: {sorted(findings(one))} and {sorted(findings(other))}")
