"""What a function of the package calls, as far as its source says: for the walks in the documentation.

A call `f(...)`, `module.f(...)`, `self.f(...)` or `owner.f(...)` is found by its name. Where the source says
which file has what is called (an import, the caller's own class, the annotated class of the owner) that file
is known too; elsewhere it is None: a Protocol, or a function that was passed in.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import paceline

PACKAGE = Path(paceline.__file__).parent


@dataclass(frozen=True)
class Called:
    """A call by this name. `file` has the function, None: the source does not say. `passed_in`: what is
    called is a parameter or a field, so that whoever made the caller decided which function it is."""

    name: str
    file: str | None = None
    passed_in: bool = False


@dataclass(frozen=True)
class _Scope:
    """A function, with what surrounds it in its file."""

    file: str
    function: ast.FunctionDef
    owner: ast.ClassDef | None


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


def scopes(file: str, function: str) -> Iterator[_Scope]:
    """Every function or method of this name in a file; nested ones too."""

    def visit(node: ast.AST, owner: ast.ClassDef | None) -> Iterator[_Scope]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef) and child.name == function:
                yield _Scope(file, child, owner)
            yield from visit(child, child if isinstance(child, ast.ClassDef) else owner)

    yield from visit(tree(file), None)


def is_property(file: str, function: str) -> bool:
    return any(
        ast.unparse(mark).rpartition(".")[2] in ("property", "cached_property")
        for scope in scopes(file, function)
        for mark in scope.function.decorator_list
    )


def calls(file: str, function: str) -> Iterator[Called]:
    """What the bodies of the functions of this name call, and the attributes that they read: properties."""
    for scope in scopes(file, function):
        for node in ast.walk(scope.function):
            if isinstance(node, ast.Call):
                called = node.func
                # A row of a table, which is called.
                called = called.value if isinstance(called, ast.Subscript) else called
                yield from _resolved(called, scope)


def reads(file: str, function: str, name: str) -> bool:
    """Whether a function reads `something.name`."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)
        for scope in scopes(file, function)
        for node in ast.walk(scope.function)
    )


def _resolved(called: ast.expr, scope: _Scope) -> Iterator[Called]:
    if isinstance(called, ast.Name):
        file, _ = _home(scope.file, called.id)
        yield Called(called.id, file, called.id in _parameters(scope.function))
    elif isinstance(called, ast.Attribute):
        value, name = called.value, called.attr
        if isinstance(value, ast.Name) and value.id in ("self", "cls") and scope.owner is not None:
            if name in _methods(scope.owner):
                yield Called(name, scope.file)
            else:
                yield Called(name, None, name in _fields(scope.owner))
        elif isinstance(value, ast.Name) and (module := _imported_module(scope.file, value.id)):
            yield Called(name, module)
        else:
            yield Called(name, _file_of_class(_annotation(value, scope), scope.file, name))


def _parameters(function: ast.FunctionDef) -> dict[str, ast.expr | None]:
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {one.arg: one.annotation for one in named}


def _methods(owner: ast.ClassDef) -> set[str]:
    return {part.name for part in owner.body if isinstance(part, ast.FunctionDef)}


def _fields(owner: ast.ClassDef) -> dict[str, ast.expr | None]:
    """The annotated fields of a class, and what its methods assign to `self`, with their classes."""
    found: dict[str, ast.expr | None] = {}
    for method in (part for part in owner.body if isinstance(part, ast.FunctionDef)):
        given = _parameters(method)
        for node in ast.walk(method):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    kind = node.annotation if isinstance(node, ast.AnnAssign) else None
                    if kind is None and isinstance(value, ast.Name):
                        kind = given.get(value.id)
                    if kind is None and isinstance(value, ast.Call):
                        kind = value.func
                    found.setdefault(target.attr, kind)
    for part in owner.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found[part.target.id] = part.annotation
    return found


def _annotation(value: ast.expr, scope: _Scope) -> ast.expr | None:
    """The class of what a method is called on: a parameter, `self.field`, or an object that was just made."""
    if isinstance(value, ast.Name):
        return _parameters(scope.function).get(value.id)
    if isinstance(value, ast.Attribute) and ast.unparse(value.value) == "self" and scope.owner is not None:
        return _fields(scope.owner).get(value.attr)
    return value.func if isinstance(value, ast.Call) else None


def _file_of_class(annotation: ast.expr | None, file: str, method: str) -> str | None:
    """The file of the class in an annotation, if the class has this method itself and is no Protocol."""
    if isinstance(annotation, ast.BinOp):  # `Class | None`
        annotation = annotation.left
    if not isinstance(annotation, ast.Name):
        return None
    home, name = _home(file, annotation.id)
    if home is None:
        return None
    for node in ast.walk(tree(home)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
            return home if method in _methods(node) and not protocol else None
    return None


def _home(file: str, name: str) -> tuple[str | None, str]:
    """The file that defines what a name stands for in this file, and its name there."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                if (one.asname or one.name) == name:
                    found = _module_file(node.module or "")
                    # A module may pass on what another one defines.
                    return _home(found, one.name) if found else (None, name)
    own = any(
        isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name for node in tree(file).body
    )
    return (file if own else None), name


def _imported_module(file: str, name: str) -> str | None:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                if (one.asname or one.name) == name and (found := _module_file(f"{node.module}.{one.name}")):
                    return found
    return None


def _module_file(module: str) -> str | None:
    """The path of a module from the package, if it is one of ours."""
    path = Path(*module.split(".")[1:])
    if not module.startswith("paceline."):
        return None
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if (PACKAGE / candidate).is_file():
            return str(candidate)
    return None
