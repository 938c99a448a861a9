"""What the code of a kernel is written in: the modules it depends on, and a digest of them without
their prose.

Comments, docstrings, blank lines and the way an expression is broken into lines leave a digest as
it was; so do Python 3.11 to 3.13, which parse these files alike. Whether a change that it shows is
one of machine code only a compilation tells: `kdabench binaries`.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = "kda_kernels"
_ROOT = Path(__file__).parent.parent
_ALWAYS = (f"{PACKAGE}.problem", f"{PACKAGE}.device.gpu")
"""Decide code by their constants, though they know nothing of the DSL."""


def path_of(module: str) -> Path:
    """The file of a module of this package, by its full name. Raises ModuleNotFoundError."""
    place = _ROOT.joinpath(*module.split(".")[1:])
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if module.split(".")[0] == PACKAGE and path.is_file():
            return path
    raise ModuleNotFoundError(f"{module} is no module of {PACKAGE}", name=module)


def behind(module: str) -> tuple[str, ...]:
    """The modules of this package that decide the code of a kernel in `module`, itself included,
    sorted.

    Those that use the DSL, themselves or by what they import at the top, and the problem's
    constants.
    """
    return tuple(sorted({*in_order((module,)), *_ALWAYS}))


def in_order(modules: Iterable[str]) -> list[str]:
    """Of these modules and those behind them the ones that use the DSL, or need such: each behind
    what it needs."""
    uses: dict[str, bool] = {}

    def visit(module: str) -> bool:
        if module not in uses:
            needed, uses_dsl = _imports(path_of(module))
            for other in needed:
                uses_dsl |= visit(other)
            uses[module] = uses_dsl
        return uses[module]

    for module in modules:
        visit(module)
    return [module for module, uses_dsl in uses.items() if uses_dsl]


def digest(modules: Iterable[str]) -> str:
    """sha256 over what the modules say, but for comments and docstrings."""
    total = hashlib.sha256()
    for module in sorted(modules):
        total.update(f"{module}\0{said(path_of(module))}\0".encode())
    return "sha256:" + total.hexdigest()


def definitions(path: Path) -> dict[str, str]:
    """Digests of a file's functions, classes and constants, by name; imports are none."""
    found = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = (
            statement.targets
            if isinstance(statement, ast.Assign)
            else [getattr(statement, "target", None)]
        )
        names = [
            getattr(statement, "name", None),
            *(getattr(target, "id", None) for target in targets),
        ]
        for name in names:
            if name is not None:
                found[name] = hashlib.sha256("\0".join(_spelled(statement)).encode()).hexdigest()
    return found


@cache
def said(path: Path) -> str:
    """sha256 of a Python file's syntax tree without docstrings."""
    return hashlib.sha256(
        "\0".join(_spelled(ast.parse(path.read_text(encoding="utf-8")))).encode()
    ).hexdigest()


def _spelled(node: object) -> Iterator[str]:
    """A tree as text. Empty fields are left out: versions of Python differ in which there are."""
    if isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            if isinstance(node, _DOCUMENTED) and name == "body":
                value = _without_docstring(value)
            if value is not None and value != [] and name not in ("kind", "type_comment"):
                yield f".{name}"
                yield from _spelled(value)
        yield "end"
    elif isinstance(node, list):
        for item in node:
            yield from _spelled(item)
    else:
        yield repr(node)


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """A body without bare texts: docstrings, and those below a constant."""
    return [
        statement
        for statement in body
        if not (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        )
    ]


@cache
def _imports(path: Path) -> tuple[tuple[str, ...], bool]:
    """The modules of this package that a file imports at its top, and whether it imports the
    DSL."""
    found, uses_dsl = [], False
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            uses_dsl |= node.module.split(".")[0] == "cutlass"
            if node.module.split(".")[0] == PACKAGE:
                found += [_module(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            uses_dsl |= any(alias.name.split(".")[0] == "cutlass" for alias in node.names)
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE]
    return tuple(dict.fromkeys(found)), uses_dsl


def _module(package: str, name: str) -> str:
    """What `from package import name` imports: a module of that name, or the package."""
    try:
        path_of(f"{package}.{name}")
    except ModuleNotFoundError:
        return package
    return f"{package}.{name}"
