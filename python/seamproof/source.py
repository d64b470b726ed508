"""The part of a Python file that one function needs: what a repro carries with it."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "seamproof"
# Stands in for the package where a function names it: results are read by name, the mark of autograd is a text, and
# options are those that the subject had.
STAND_IN = """class _Seamproof:  # stands in for the package that found this
    Problem, autograd, Refused = object, "autograd", RuntimeError
    options = lambda: {options!r}

    class Result:
        def __init__(self, out, lse=None, max_logit=None, dq=None, dk=None, dv=None, dsink=None, grads=None):
            self.__dict__.update({{name: value for name, value in locals().items() if name != "self"}})


"""


# The part of the package that deals rows to ranks, which a script of several ranks carries.
DEALING = ("dealing.py", ["Parallel"])
ATTEND = ("cp/attend.py", ["attend", "as_one", "by_sequence"])
ALONE = "cp/alone.py"
CARRIED = "# --- what a script carries begins here\n"
# Names of the package in those files.
RANKS = """from types import SimpleNamespace

DeclarationError, Problem, Result, Run = RuntimeError, object, _Seamproof.Result, object
launched = SimpleNamespace(here=lambda: None)


"""
_CP = """
# Rank 0 speaks for all.
if int(os.environ.get("RANK", 0)):
    sys.stdout = open(os.devnull, "w")
_found = found_of
_Seamproof.cp = SimpleNamespace(attend=attend, as_one=as_one, by_sequence=by_sequence, Local=Local)
_Seamproof.launched = launched


"""


# Stands in for the package where a whole file is loaded that imports it and calls it at the top.
_WHOLE = """
class _Whatever:  # what a file asks of the package while it is loaded
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *given, **_):
        return given[0] if len(given) == 1 and callable(given[0]) else self


_package = _Whatever()
_package.__dict__.update(vars(_Seamproof))
sys.modules.update({"seamproof": _package, "seamproof.cp": _Seamproof.cp, "seamproof.launched": launched})


def _loaded(name, text):
    module = sys.modules[name] = type(sys)(name)
    exec(compile(text, name + ".py", "exec"), module.__dict__)
    return module


"""


class NoSource(Exception):
    """A function whose source cannot stand alone; the text says why."""


@dataclass(frozen=True)
class Kernel:
    """How a script gets at a function: the lines that define or import it, and its name there."""

    text: str
    name: str
    # Whether the lines import the function's file, which may import this package.
    imports_file: bool = False
    # Whether the lines deal rows to ranks as this package does.
    has_ranks: bool = False


def installed(function: Callable[..., Any]) -> bool:
    """Returns whether a function is of an installed library, so that a script can import it by its name."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function)) or ""
    except TypeError:
        return True
    return "site-packages" in file or "dist-packages" in file


def importing(function: Callable[..., Any]) -> Kernel:
    """Returns the import of a function of an installed library."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise NoSource("the kernel has no name that a script can import")
    first = name.partition(".")[0]
    return Kernel(f"from {module} import {first}\n", name)


def whole(file: Path, name: str, others: list[str], options: dict[str, str]) -> Kernel:
    """Returns a file of a program of several ranks with the files beside it that it imports, without this package.

    `options` are those that the files read with `seamproof.options()`.
    """
    stand_in = STAND_IN.format(options=options)
    parts = ["from __future__ import annotations\nimport sys\n", stand_in, *ranks(), _WHOLE]
    *neighbours, (_, text) = _with_neighbours(file)
    parts += [f"_loaded({module!r}, {_literal(text)})\n" for module, text in neighbours]
    parts.append(f"_module = _loaded('kernel_file', {_literal(text)})\nkernel = _module.{name}\n")
    parts += [f"{other} = _module.{other}\n" for other in others]
    return Kernel("".join(parts), "kernel", has_ranks=True)


def _with_neighbours(file: Path) -> list[tuple[str, str]]:
    """Returns the names and texts of a file and of those beside it that it imports, each behind what it needs."""
    found: dict[str, str] = {}

    def add(path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            names = [item.name for item in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                beside = path.with_name(f"{name}.py")
                if name not in found and beside.is_file() and beside != path:
                    add(beside)
        found[path.stem] = text

    add(file)
    return list(found.items())


def _literal(text: str) -> str:
    """Returns a text as a literal that can be read, where that is possible."""
    is_plain = "'''" not in text and "\\" not in text
    return f"'''{text}'''" if is_plain else repr(text)


def from_file(file: str, name: str, others: list[str], options: dict[str, str] | None = None) -> Kernel:
    """Returns the import of a function of a file that may import this package, and of others that it needs.

    `options` are those that the file reads with `seamproof.options()`.
    """
    given = f"import seamproof.loading\n\nseamproof.loading.give({options!r})\n" if options else ""
    text = f"""import importlib.util, os, sys
{given}
FILE = {file!r}
sys.path.insert(0, os.path.dirname(FILE))
_spec = importlib.util.spec_from_file_location("kernel_file", FILE)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
kernel = _module.{name}
kernel = getattr(kernel, "function", kernel)
"""
    text += "".join(f"{other} = _module.{other}\n" for other in others)
    return Kernel(text, "kernel", imports_file=True)


def embedded(functions: list[Callable[..., Any]], options: dict[str, str]) -> Kernel:
    """Returns the source of functions of one file with all that they need of it, without this package.

    `options` are those that the file reads with `seamproof.options()`.
    """
    function = functions[0]
    if any("<" in getattr(item, "__qualname__", "<") for item in functions):
        raise NoSource("the kernel is defined inside a function, so that no script can define it alone")
    try:
        text = Path(inspect.getsourcefile(function) or "").read_text(encoding="utf-8")
    except (OSError, TypeError) as error:
        raise NoSource(f"the kernel's source cannot be read: {error}") from error
    file = _File(text, function.__globals__)
    chosen, names = file.needed([item.__name__ for item in functions])
    lines, has_ranks = file.future(), False
    if file.names_package(names):
        has_ranks = file.calls_attend(chosen)
        lines.append(STAND_IN.format(options=options))
        lines += ["from __future__ import annotations\n", *ranks()] if has_ranks else []
        lines += file.stand_ins(names)
    lines += file.sources(chosen)
    return Kernel("".join(lines), function.__name__, has_ranks=has_ranks)


def ranks() -> Iterator[str]:
    """Yields the lines by which a script runs a program of several ranks with torch, without this package."""
    package = Path(__file__).parent
    yield RANKS
    for place, names in (DEALING, ATTEND):
        file = _File((package / place).read_text(encoding="utf-8"), {})
        chosen, _ = file.needed(names, without="_found")
        yield from file.sources(chosen)
        yield "\n\n"
    imports, _, carried = (package / ALONE).read_text(encoding="utf-8").partition(CARRIED)
    yield imports.rpartition('"""')[2].lstrip("\n")
    yield carried
    yield _CP


class _File:
    """The statements at the top of a file, by the names that they bind."""

    def __init__(self, text: str, values: dict[str, Any]):
        self._values = values
        self._lines = text.splitlines(keepends=True)
        self._body = ast.parse(text).body
        self._aliases = {name for node in self._body for name in _package_names(node)}

    def needed(self, names: list[str], without: str | None = None) -> tuple[list[int], set[str]]:
        """Returns which statements bind these names or any that they use, in their order, and all those names.

        `without` is a name whose statement is left out. Imports of neighbours in a package are left out too.
        """
        chosen: set[int] = set()
        open_names, seen = list(names), set(names)
        while open_names:
            name = open_names.pop()
            for index, node in enumerate(self._body):
                is_left_out = getattr(node, "level", 0) or name == without
                bound = _bound(node) - _package_names(node)
                if index not in chosen and name in bound and not is_left_out:
                    chosen.add(index)
                    fresh = self._used(node) - seen
                    seen |= fresh
                    open_names += fresh
        return sorted(chosen), seen

    def future(self) -> list[str]:
        """Returns the source of the imports that stand before all others."""
        return [
            self._source(node)
            for node in self._body
            if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ]

    def names_package(self, names: set[str]) -> bool:
        """Returns whether one of these names is this package's."""
        return not names.isdisjoint(self._aliases)

    def stand_ins(self, names: set[str]) -> Iterator[str]:
        """Yields the lines that bind those of these names that are this package's."""
        for node in self._body:
            yield from _stand_ins(node, names)

    def calls_attend(self, chosen: list[int]) -> bool:
        """Returns whether one of these statements calls `attend` of this package."""
        return any(self._is_of_ranks(self._body[index]) for index in chosen)

    def sources(self, chosen: list[int]) -> Iterator[str]:
        """Yields the source of these statements."""
        last = None
        for index in chosen:
            node = self._body[index]
            # A blank line where the file has one.
            if last is not None and self._first_line(node) > last.end_lineno + 1:
                yield "\n\n" if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else "\n"
            yield self._source(node)
            last = node

    def _used(self, node: ast.stmt) -> set[str]:
        if self._constant(node) is not None:
            return set()
        parts: list[ast.AST] = [node]
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            ours = [item for item in node.decorator_list if self._is_ours(item)]
            parts = [part for part in ast.iter_child_nodes(node) if part not in ours]
        walked = (item for part in parts for item in ast.walk(part))
        return {item.id for item in walked if isinstance(item, ast.Name)}

    def _is_ours(self, decorator: ast.expr) -> bool:
        return any(isinstance(item, ast.Name) and item.id in self._aliases for item in ast.walk(decorator))

    def _is_of_ranks(self, node: ast.stmt) -> bool:
        """Whether a statement calls `attend` of this package, by `seamproof.cp` or by its own name."""
        calls = (item.func for item in ast.walk(node) if isinstance(item, ast.Call))
        named = (func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls)
        return "attend" in named and any(
            isinstance(item, ast.Attribute) and item.attr == "cp" for item in ast.walk(node)
        )

    def _first_line(self, node: ast.stmt) -> int:
        decorators = [item for item in getattr(node, "decorator_list", []) if not self._is_ours(item)]
        return min([node.lineno, *(item.lineno for item in decorators)])

    def _constant(self, node: ast.stmt) -> str | None:
        """Returns a plain value as it is now, which no option and no variable of the environment changes."""
        if (
            not isinstance(node, ast.Assign)
            or len(node.targets) != 1
            or not isinstance(node.targets[0], ast.Name)
        ):
            return None
        name = node.targets[0].id
        value = self._values.get(name, ...)
        if value is None or type(value) in (bool, int, str):
            return f"{name} = {value!r}\n"
        return None

    def _source(self, node: ast.stmt) -> str:
        constant = self._constant(node)
        if constant is not None:
            return constant
        lines = "".join(self._lines[self._first_line(node) - 1 : node.end_lineno]).rstrip("\n") + "\n"
        # A line that imports this package may import others too.
        if isinstance(node, (ast.Import, ast.ImportFrom)) and PACKAGE in lines:
            return ast.unparse(_without_package(node)) + "\n"
        return lines


def bound_again(part: str, whole: str) -> str | None:
    """Returns a name other than an import's that a part of a text defines, and another part as well."""
    of_part, of_whole = (
        Counter(
            name
            for node in ast.parse(text).body
            if not isinstance(node, (ast.Import, ast.ImportFrom))
            for name in _bound(node)
        )
        for text in (part, whole)
    )
    return next((name for name, count in of_part.items() if of_whole[name] > count), None)


def _is_package(item: ast.alias) -> bool:
    return item.name.partition(".")[0] == PACKAGE


def _without_package(node: ast.stmt) -> ast.stmt:
    """Returns an import without this package; of `from` imports those of other packages come here alone."""
    if isinstance(node, ast.Import):
        return ast.Import([item for item in node.names if not _is_package(item)])
    return node


def _package_names(node: ast.stmt) -> set[str]:
    """Returns the names that an import of this package binds."""
    if isinstance(node, ast.Import):
        return {item.asname or PACKAGE for item in node.names if _is_package(item)}
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
        return {item.asname or item.name for item in node.names}
    return set()


def _stand_ins(node: ast.stmt, used: set[str]) -> Iterator[str]:
    names = _package_names(node) & used
    if isinstance(node, ast.Import):
        yield from (f"{name} = _Seamproof\n" for name in sorted(names))
    elif names and isinstance(node, ast.ImportFrom):
        for item in node.names:
            if (item.asname or item.name) in names:
                yield f"{item.asname or item.name} = getattr(_Seamproof, {item.name!r}, None)\n"


def _bound(node: ast.stmt) -> set[str]:
    """Returns the names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {item.asname or item.name.partition(".")[0] for item in node.names}
    names = set()
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            names.add(item.id)
        elif isinstance(item, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)):
            names |= _bound(item)
    return names
