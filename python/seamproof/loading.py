"""Subjects by the name of their file, and the options that such a name carries."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import DeclarationError, NotHere
from .subject import Subject

# Options of the subject being loaded; `options` returns them, and notes that somebody asked.
_options: dict[str, str] = {}
_asked = False
# How alike two names are of which one is taken for a slip, and how long. Short names are like many.
NEAR, LONG_NAME = 0.75, 4
# Names of options that were read one by one.
_read: set[str] = set()


class _Options(dict[str, str]):
    """Options that note which of them are read by name."""

    def __getitem__(self, name: str) -> str:
        _read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        _read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an option, or a default where it is not given."""
        _read.add(name)
        return super().get(name, default)


def options() -> dict[str, str]:
    """Returns the options that the subject's name carries: `python:FILE:NAME:tile=64` gives `{"tile": "64"}`.

    They are there while the subject's file is being loaded, and empty in any other process.
    """
    global _asked
    _asked = True
    return _Options(_options)


def give(given: dict[str, str]) -> None:
    """Sets what `options` returns."""
    global _asked
    _asked = False
    _read.clear()
    _options.clear()
    _options.update(given)


def load_file(path: str) -> ModuleType:
    """Returns a Python file as a module, its folder being where it finds its neighbours."""
    file = Path(path).resolve()
    if not file.is_file():
        raise DeclarationError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise DeclarationError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def find_subject(module: ModuleType, name: str | None, path: str) -> Subject:
    """Returns the subject of that name, or the only one of a file."""
    found = {key: value for key, value in vars(module).items() if isinstance(value, Subject)}
    if name is None:
        distinct = list({id(value): key for key, value in found.items()}.values())
        if len(distinct) != 1:
            which = (
                f"has the subjects {', '.join(distinct)}: name one, as {path}:{distinct[0]}"
                if distinct
                else (
                    "has no subject: decorate a function with @seamproof.flash_varlen or @seamproof.subject"
                )
            )
            raise DeclarationError(f"{path} {which}")
        name = distinct[0]
    value = getattr(module, name, None)
    if isinstance(value, Subject):
        return value
    if value is None:
        raise DeclarationError(f"{path} has no {name!r}; its subjects are: {', '.join(found) or 'none'}")
    raise DeclarationError(
        f"{name!r} in {path} is no subject: decorate it with @seamproof.flash_varlen or subject"
    )


def _check_names(path: str) -> None:
    """Refuses an option whose name looks like that of another one, which the file reads and nobody gave.

    A name that is like no other may be read later, when the kernel runs.
    """
    for name in _options:
        near = difflib.get_close_matches(name, _read - set(_options), 1, cutoff=NEAR)
        if near and name not in _read and len(name) >= LONG_NAME:
            raise DeclarationError(f"{path} reads no option {name!r}; it reads {near[0]!r}")


def load(target: str, given: dict[str, str], request: dict[str, Any]) -> Subject:
    """Returns the subject that a request opens, ready on its device."""
    # A name is an identifier, so that C:\\file.py is a path.
    path, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier():
        path, name = target, ""
    give(given | request.get("options", {}))
    try:
        subject = find_subject(load_file(path), name or None, path)
        subject.open(request.get("device", 0))
    except (ImportError, OSError) as error:  # a module, or a library that it loads
        raise NotHere(error) from error
    if _options and not _asked:
        named = ", ".join(f"{key}={value}" for key, value in _options.items())
        raise DeclarationError(
            f"{path} asks for no options, so that {named} means nothing: leave it out, or read "
            "seamproof.options() where the file is loaded"
        )
    _check_names(path)
    narrowing = os.environ.get("SEAMPROOF_NARROW")
    return subject.narrowed(json.loads(narrowing)) if narrowing else subject
