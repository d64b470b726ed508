"""`seamproof.check`: draws problems for a kernel, judges its results, and reports what is wrong as an assertion."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import program, repro
from .errors import CannotJudge, DeclarationError, DeviceLost, OtherSubject, TooLittleRun, WrongSetting
from .frames import Channel
from .session import Session
from .subject import Subject
from .varlen import flash_varlen

BUDGET = "20s"
PROFILE = "quick"
# Where cases and scripts of findings go, unless told otherwise.
FOLDER = "seamproof.findings"
# How many reasons a message names.
MISSED_MOST = 4
# Findings behind the first that are named.
OTHERS_MOST = 4


@dataclass
class Report:
    """What a check ran and found."""

    subject: str
    outcome: str
    cases: int
    held: int
    seed: str | None
    findings: list[dict[str, Any]]
    missed: list[str]
    trouble: list[str]
    text: str
    raw: dict[str, Any] = field(repr=False, default_factory=dict)


@dataclass
class Settings:
    """Arguments of a check, as they hold after the command line and the marker of pytest."""

    budget: str | None = None
    cases: int | None = None
    profile: str | None = None
    seed: int | str | None = None
    strict: bool | None = None
    isolate: bool | None = None
    out: str | os.PathLike[str] | None = None
    replay: str | os.PathLike[str] | None = None
    narrowing: dict[str, Any] = field(default_factory=dict)

    def over(self, weaker: Settings) -> Settings:
        """Returns these settings, and the weaker ones where these say nothing."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        chosen = {name: getattr(weaker, name) if value is None else value for name, value in fields.items()}
        return Settings(**chosen | {"narrowing": {**weaker.narrowing, **self.narrowing}})

    def arguments(self, **names: str) -> list[str]:
        """Returns the options of the program. `names` renames some."""
        budget = self.budget if self.budget or self.cases is not None else BUDGET
        values = {
            "budget": budget,
            "cases": self.cases,
            "seed": self.seed,
            "profile": self.profile or PROFILE,
        }
        return [
            word
            for name, value in values.items()
            if value is not None
            for word in (f"--{names.get(name, name)}", str(value))
        ]


# What the pytest plugin sets: what the command line says, which overrules a call, and a test's marker.
forced = Settings()
marked = Settings()
# The error with which a GPU was lost in this process, if one was.
lost: str | None = None


def check(
    kernel: Subject | Callable[..., Any],
    budget: str | float | None = None,
    cases: int | None = None,
    profile: str | None = None,
    seed: int | str | None = None,
    strict: bool | None = None,
    isolate: bool | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    replay: str | os.PathLike[str] | None = None,
    **narrowing: Any,
) -> Report:
    """Holds a kernel against the exact answer on drawn problems; raises `AssertionError` on a finding.

    The error has the finding in words, the path of the smallest failing case, the command that replays it, and a
    script that shows the failure with nothing but the kernel and numpy or torch.

    `budget` is a time, `"20s"` where neither it nor `cases` is given; a number counts seconds. `profile` is `"quick"`,
    `"seams"` or `"large"`. The same `seed` draws the same cases. With `strict` a check that ran too little fails, where
    it only warns otherwise. The kernel runs in this process; with `isolate` it runs in workers, which may crash or
    hang, and the kernel must be a name in its file. `replay` judges a stored case instead of drawing any. Further
    arguments narrow what the kernel is asked, as `masks="window"` or `backward=False`: `declare.narrowed` lists them.
    """
    global lost
    __tracebackhide__ = True  # pytest shows the caller's line.
    asked = Settings(_time(budget), cases, profile, seed, strict, isolate, out, replay, narrowing)
    settings = forced.over(asked).over(marked)
    subject = _subject(kernel).narrowed(settings.narrowing)
    if forced.replay is not None:
        _of_this_subject(subject, forced.replay)
    if settings.isolate:
        report, session = _isolated(subject, settings), None
    else:
        if lost is not None and not _on_cpu(subject):
            raise DeviceLost(
                f"an earlier check left the GPU in error, so nothing can run on it any more: {lost}"
            )
        report, session = _in_process(subject, settings)
        if session.spoilt is not None and session.spoilt[0] == "Crash":
            lost = session.spoilt[1].partition("\n")[0]
    return _conclude(subject, settings, report, session)


def _time(budget: str | float | None) -> str | None:
    return f"{round(1000 * budget)}ms" if isinstance(budget, (int, float)) else budget


def _subject(kernel: Subject | Callable[..., Any]) -> Subject:
    if isinstance(kernel, Subject):
        return kernel
    if callable(kernel):
        return dataclasses.replace(flash_varlen(kernel), scope=getattr(kernel, "__globals__", {}))
    raise DeclarationError(f"check takes a function, not a {type(kernel).__name__}")


def _of_this_subject(subject: Subject, path: str | os.PathLike[str]) -> None:
    """Refuses a case of the command line that another test's subject failed."""
    name, of_case = subject_name(subject), _read_case(path)["subject"]["name"]
    if "called" not in (name, of_case) and Path(name).name != Path(of_case).name:
        raise OtherSubject(f"{path} is a case of {of_case}, and this test checks {name}")


def _on_cpu(subject: Subject) -> bool:
    return subject.open().device_name() == ""


def subject_name(subject: Subject) -> str:
    """Returns the name of a subject in stored cases: one that the command line takes, where its file has one."""
    file, path = subject.file(), subject.path()
    if file is None or path is None or not Path(file).is_file():
        return "called"
    file = program.relative(file)
    # The name's parts are told apart by these.
    return "called" if set(":,") & set(file) else f"python:{file}:{path}"


def _in_process(subject: Subject, settings: Settings) -> tuple[Report, Session]:
    """Runs the program as the supervisor of this process."""
    name = subject_name(subject)
    subject.open()
    with tempfile.TemporaryDirectory(prefix="seamproof-") as folder:
        summary, said = Path(folder, "summary.json"), Path(folder, "said.txt")
        text = Path(folder, "text.txt")
        command = [program.find(), "serve", "--name", name, "--json", str(summary), "--text", str(text)]
        command += ["--replay", str(settings.replay)] if settings.replay else settings.arguments()
        with open(said, "wb") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
            )
        try:
            channel = Channel(process.stdout, process.stdin)
            session = Session(channel, lambda request: subject, strict=True)
            with contextlib.suppress(BrokenPipeError):
                session.serve()
            channel.close()
            process.wait()
        finally:
            program.end(process)
        if not summary.is_file():
            raise _no_result(command, process.returncode, said.read_text(errors="replace"))
        return _report(name, json.loads(summary.read_text())), session


def _isolated(subject: Subject, settings: Settings) -> Report:
    """Runs a campaign whose workers import the subject's file."""
    name = subject_name(subject)
    if name == "called":
        raise DeclarationError(
            f"isolate=True starts processes that import the kernel, but {subject.name!r} is no name of a file: define "
            "it at the top of a module, in a path without commas and colons, or leave out isolate=True"
        )
    with tempfile.TemporaryDirectory(prefix="seamproof-") as folder:
        events, left = Path(folder, "events.jsonl"), Path(folder, "left")
        command = [program.find()]
        if settings.replay:
            command += ["replay", str(settings.replay), "--backend", name]
        else:
            command += ["run", "--backend", name, "--json", str(events), "--out", str(left)]
            command += settings.arguments(budget="time")
            # One script is enough, and it is made here.
            command += ["--scripts", "0"]
        done = subprocess.run(
            command, env=worker_environment(settings.narrowing), capture_output=True, text=True
        )
        if settings.replay:
            return _replayed(name, settings, done)
        lines = events.read_text().splitlines() if events.is_file() else []
        said = [json.loads(line) for line in lines]
        if not said or said[-1]["event"] != "summary":
            raise _no_result(command, done.returncode, done.stderr or done.stdout)
        return _report_of_events(name, said, left, done)


def worker_environment(narrowing: dict[str, Any]) -> dict[str, str]:
    """Returns the environment in which the program starts workers of this very Python."""
    found = {**os.environ, "SEAMPROOF_PYTHON": sys.executable}
    # A worker must find this package as this process does.
    here = str(Path(__file__).parent.parent)
    found["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    if narrowing:
        found["SEAMPROOF_NARROW"] = json.dumps(narrowing)
    return found


def _report(name: str, summary: dict[str, Any]) -> Report:
    return Report(
        subject=name,
        outcome=summary["outcome"],
        cases=summary.get("cases", 0),
        held=summary.get("held", 0),
        seed=summary.get("seed"),
        findings=summary.get("findings", []),
        missed=summary.get("missed", []),
        trouble=[*summary.get("trouble", []), *filter(None, [summary.get("ended")])],
        text=summary.get("text", ""),
        raw=summary,
    )


OUTCOMES = {0: "held", 1: "input", 2: "finding", 3: "crash", 4: "too-little-run", 5: "canary-missed"}


def _report_of_events(name: str, said: list[dict[str, Any]], left: Path, done: Any) -> Report:
    summary, findings = said[-1], {}
    outcome = OUTCOMES.get(done.returncode, "internal")
    for event in said:
        if event["event"] == "finding" and event.get("name"):
            findings[json.dumps(event["key"], sort_keys=True)] = _finding_of(event, left / "findings")
        if event["event"] == "canary" and outcome == "canary-missed":
            # No case of the campaign showed them.
            for number, own in enumerate(event.get("own", [])):
                findings[f"canary {number}"] = _finding_of(own, left / "canary")
    return Report(
        subject=name,
        outcome=outcome,
        cases=summary.get("cases", 0),
        held=summary.get("held", 0),
        seed=said[0].get("seed"),
        findings=list(findings.values()),
        missed=summary.get("missed", []),
        trouble=[*summary.get("infrastructure", []), *filter(None, [summary.get("void")])],
        text=done.stdout,
        raw=summary,
    )


def _finding_of(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a finding as a summary has it, from an event and the folder of its case."""
    file = folder / f"{told.get('name')}.json"
    return {
        "what": _finding_words(told["finding"]),
        "problem": told["problem"],
        "minimal": told.get("minimal", False),
        "case": json.loads(file.read_text()) if file.is_file() else None,
    }


def _finding_words(finding: dict[str, Any]) -> str:
    place = ", ".join(
        f"{key} {value}" for key, value in (finding.get("place") or {}).items() if value is not None
    )
    parts = [finding["check"], finding.get("identity"), finding.get("tensor"), place]
    words = " · ".join(part for part in parts if part) + f": {finding['what']}"
    if finding.get("got") is not None and finding.get("expected") is not None:
        bound = f" ± {finding['bound']}" if finding.get("bound") is not None else ""
        words += f"; got {finding['got']}, expected {finding['expected']}{bound}"
    return words


def _replayed(name: str, settings: Settings, done: Any) -> Report:
    outcome = OUTCOMES.get(done.returncode, "internal")
    text = (done.stdout + done.stderr).strip()
    if outcome in ("input", "internal"):
        raise CannotJudge(f"the case could not be replayed: {text}")
    found = [{"what": text, "problem": "", "minimal": True, "case": _read_case(settings.replay)}]
    failed = outcome in ("finding", "crash")
    return Report(name, outcome, 1, int(not failed), None, found if failed else [], [], [], text)


def _read_case(path: Any) -> dict[str, Any]:
    return json.loads(Path(path).read_text())


def _no_result(command: list[str], code: int, said: str) -> Exception:
    """Returns the error of a program that ended without a result."""
    if OUTCOMES.get(code) == "input" and said.startswith("error: "):
        return WrongSetting(said.removeprefix("error: ").strip())
    said = said.strip() or "it said nothing"
    return CannotJudge(f"the program gave no result (exit code {code}): {said}\n  {program.quoted(command)}")


def _conclude(subject: Subject, settings: Settings, report: Report, session: Session | None) -> Report:
    """Returns a report that holds; raises, or warns, for any other."""
    __tracebackhide__ = True
    if report.findings or report.outcome in ("finding", "crash"):
        error = AssertionError(_finding_text(subject, settings, report))
        raise error from (session.raised if session is not None else None)
    if report.outcome == "held":
        return report
    if report.outcome == "too-little-run":
        more = f"; and {len(report.missed) - MISSED_MOST} more" if len(report.missed) > MISSED_MOST else ""
        why = "; ".join(report.missed[:MISSED_MOST]) + more or report.text
        words = f"{report.subject}: nothing was found, but too little was run: {why}"
        if settings.strict:
            raise AssertionError(words)
        warnings.warn(TooLittleRun(words), stacklevel=3)
        return report
    trouble = "; ".join(report.trouble) or report.text
    if report.outcome == "canary-missed":
        raise CannotJudge(
            "the check is void: it did not even find the wrong call that it tests itself with, so finding nothing "
            f"else says nothing. {trouble}".rstrip()
        )
    if report.outcome == "input":
        raise DeclarationError(f"{report.subject} declares what the program does not understand: {trouble}")
    raise CannotJudge(f"the program failed: {trouble}")


def _finding_text(subject: Subject, settings: Settings, report: Report) -> str:
    if not report.findings:
        return f"{report.subject}: {'; '.join(report.trouble) or report.text}"
    # An identity compares two runs; other checks say more about one.
    first, *others = sorted(report.findings, key=lambda finding: finding["what"].startswith("identity"))
    lines = [f"{subject.name}: {first['what']}"]
    if first.get("problem"):
        lines.append(f"on        {first['problem']}")
    if first.get("case") is not None:
        lines += _evidence(subject, settings, report, first)
    if others:
        lines.append(f"and {len(others)} more:")
        for finding in others[:OTHERS_MOST]:
            lines.append(f"  {finding['what']}")
            if finding.get("case") is not None:
                case = _keep(subject, settings, finding)
                lines.append(f"    replay  {replay_command(report.subject, case)}")
    if not settings.replay:
        lines.append(f"{report.cases} cases, {report.held} held; seed {report.seed}")
    return "\n".join(lines)


def _evidence(subject: Subject, settings: Settings, report: Report, finding: dict[str, Any]) -> Iterator[str]:
    """Yields the lines about the files of a finding, and writes them."""
    case = _keep(subject, settings, finding)
    yield f"case      {program.relative(case)}"
    yield f"replay    {replay_command(report.subject, case)}"
    made = repro.of_case(case, lambda _: subject, repro.Limits(time.monotonic() + repro.SECONDS))
    if made.written:
        told = f"{program.python()} {program.quoted([program.relative(repro.beside(case))])}"
        yield f"script    {told}" + (f" ({made.doubt})" if made.doubt else "")
    else:
        yield f"script    {made.doubt}"


def _keep(subject: Subject, settings: Settings, finding: dict[str, Any]) -> Path:
    """Writes the case of a finding, and returns its path."""
    folder = Path(settings.out or FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    case = folder / (_file_name(subject, finding["case"]) + ".json")
    case.write_text(json.dumps(finding["case"], indent=1) + "\n")
    return case


def _file_name(subject: Subject, case: dict[str, Any]) -> str:
    found = case.get("found", {}).get("finding", {})
    parts = [subject.name, found.get("check", "case"), found.get("tensor") or ""]
    words = "-".join(re.sub(r"[^A-Za-z0-9]+", "-", part).strip("-") for part in parts if part)
    return f"{words}-{repro.digest(case)[:8]}"


def replay_command(name: str, case: Path) -> str:
    """Returns the command that judges a stored case again."""
    path = program.relative(case)
    if name == "called":
        return f"pytest --seamproof-replay={path} (the kernel has no name that a shell can give)"
    return program.named_python() + program.quoted([program.typed(), "replay", path])
