"""The shape of the source tree: no import cycle, arrows that stay gone, sizes with a limit, one name for one
thing.

import-linter proves the layers (`make check`). These tests count what it does not: imports for types only and
imports inside functions, by `import_module`, too, because a cycle through them is a cycle for the reader; and
cycles between the folders of one layer. An exception is named, with its reason, and an exception that is no
longer needed fails.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
TESTS = Path(__file__).parent

FILE_LINES = 450
FUNCTION_LINES = 80
ARGUMENTS = 8
PROTOCOL_METHODS = 5
PRIVATE_ACCESSES = 40
"""How often tests look at a private attribute of what they test. The number may only fall."""

# What may be over a limit, with the reason.
MANY_ARGUMENTS = {
    "paceline.frontends.framework_trainers.horovod_trainer:__init__": "as PyTorchDDPTrainer's",
    "paceline.frontends.ddp_trainer.ddp_trainer:__init__": "one argument for each that "
    "users of such trainers know; all but the model have a default",
    "paceline.frontends.launcher.distributed_launcher:launch_distributed_training": "a front door: the "
    "fields of LaunchConfig as keywords, the script's arguments beside them",
    "paceline.cli.train:train": "one argument for each option of `paceline train`, as typer wants them",
    "paceline.cli.submit:submit": "one argument for each option of `paceline submit`, as typer wants them",
    "paceline.cli.join:join": "one argument for each option of `paceline join`, as typer wants them",
    "paceline.cli.queue:add": "one argument for each option of `paceline queue add`, as typer wants them",
    "paceline.cli.tune:tune": "one argument for each option of `paceline tune`, as typer wants them",
    "paceline.cli.doctor:doctor": "one argument for each option of `paceline doctor`, as typer wants them",
}
MANY_METHODS = {
    "paceline.comm.transport.base:Window": "WindowMemory and WindowTicks together, for a step that copies "
    "and signals; who needs one half asks for it",
    "paceline.engines.engine:Engine": "EngineSettings, which a run's settings know, and the four steps "
    "to start agents: users write one object that is both",
    "paceline.elastic.simulation.simulated_process:MemberEnvironment": "ProcessEnvironment, and two "
    "questions of a member that trains",
    "paceline.elastic.simulation.simulated_supervisor:SimulatedShell": "SimulatedHosts and RunObserver "
    "together: the world is both, and is passed once",
}
SHARED_FILE_NAMES = {
    "__main__.py": "Python's own name for what `python -m` runs",
    "run.py": "the command, and the run that a worker's loop goes through",
    "tune.py": "the command, and the public module of the functions that trials call",
    "audit.py": "the command and the audit that it prints, as for every command of that name",
}

# A folder's own modules are what its sub-folders build on, except these, which are built on the sub-folders.
BUILT_ON_SUBFOLDERS = {
    "paceline.comm.context": "what users touch: plans calls with collectives/ and runs them on a transport",
    "paceline.comm.benchmark": "times the all-reduces of a context",
    "paceline.comm.default_group": "holds contexts",
    "paceline.comm.state_transfer": "calls of a context, and copies between processes of one host",
    "paceline.comm.transport.hybrid": "one transport of shm/ and one of tcp/ as one",
}

# (importer, imported): the four arrows that a review found and that must not come back. The last one is a
# fifth: `control` came out of `core` since, and `elastic` would reach `comm` through it.
GONE = [
    ("paceline.elastic", "paceline.comm"),
    ("paceline.train", "paceline.engines"),
    ("paceline.comm", "paceline"),
    ("paceline.frontends", "paceline.elastic.supervisor.journal_writer"),
    ("paceline.control", "paceline.comm"),
]

# (importer, imported): the arrows that would close a cycle and are allowed, with the reason.
LAZY_ARROWS = {
    (
        "paceline.train.history",
        "paceline.monitor.plot",
    ): "users expect `history.plot()` on what `fit` returns; "
    "imported when it is called, so that neither a worker nor the history needs the charts",
}

# Modules that import by a name which is not in the source, with the reason.
COMPUTED_IMPORTS = {
    "paceline.frontends.framework_trainers.framework_settings": "another framework's package, by its name",
    "paceline": "the root maps public names to modules, and is no part of the graph",
    "paceline.cli.main": "the table of commands; a command does not import `main`",
    "paceline.core.engine_registry": "the table of engines; settings name one, and import none",
    "paceline.engines.local.fork_server": "what the caller of `spawn` wants loaded before ranks are forked",
    "paceline.engines.local.forked_rank": "the user's function, which travels by its name",
}

# The modules of `elastic/supervisor` that other folders may import, with the reason.
SUPERVISOR_ENTRIES = {
    "agent": "`paceline join` runs it",
    "parent_messages": "the job that a front door has supervised, and its outcome",
    "supervisor_launcher": "starts the supervisor of a job and waits for it",
    "tool_client": "asks a running supervisor: scale, stop, status",
}

# Names in docstrings and comments that look like a module's and are not, with the reason.
NO_MODULES = {
    "checkpoint.url": "a key of the config",
    "metrics.csv": "a file of a run",
    "script.py": "a user's",
}


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of every module of the package, by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("paceline", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules of the package that a module names in any import: at load time, for types, inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module in modules():
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in modules() else node.module
        elif is_import_call(node):
            start, is_whole = named_import(node)
            yield from (
                name
                for name in modules()
                if name == start or (start and not is_whole and name.startswith(start))
            )


def is_import_call(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
        "import_module",
        "__import__",
    )


def named_import(call: ast.Call) -> tuple[str, bool]:
    """How the name that is imported begins in the source, and whether that is all of it."""
    if not call.args:
        return "", False
    name = call.args[0]
    first = name.values[0] if isinstance(name, ast.JoinedStr) and name.values else name
    if not isinstance(first, ast.Constant):
        return "", False
    return str(first.value), first is name


@cache
def arrows() -> dict[str, frozenset[str]]:
    found = {}
    for module, tree in modules().items():
        targets = frozenset(imported(tree)) - {module}
        excused = {target for target in targets if (module, target) in LAZY_ARROWS}
        found[module] = targets - excused
        _excused.update((module, target) for target in excused)
    return found


_excused: set[tuple[str, str]] = set()


def test_every_lazy_arrow_is_needed():
    arrows()
    assert _excused == set(LAZY_ARROWS)


def cycles(graph: dict[str, frozenset[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for target in graph.get(module, ()):
            if target not in index:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], index[target])
        if lowest[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in graph:
        if module not in index:
            visit(module)
    return found


def folder_graph(
    package: str, graph: dict[str, frozenset[str]], built_on: Collection[str]
) -> dict[str, frozenset[str]]:
    """The arrows between the parts of a package: each sub-folder is one node with all that is in it, the
    modules beside the sub-folders are one node together, and each module of `built_on` is a node of its own.
    """
    folders = {name.rpartition(".")[0] for name in graph}

    def part(module: str) -> str:
        child = ".".join(module.split(".")[: package.count(".") + 2])
        return child if child in folders or child in built_on else package

    result: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        if module == package or module.startswith(package + "."):
            inside = {part(target) for target in targets if (target + ".").startswith(package + ".")}
            result[part(module)] |= inside - {part(module)}
    return {name: frozenset(targets) for name, targets in result.items()}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.name}", node


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield f"{name}:{node.name}", node


def over(sizes: Iterator[tuple[str, int]], limit: int, exceptions: dict[str, str]) -> list[str]:
    """What is over a limit without an exception, and exceptions that are not over it."""
    large = {name: size for name, size in sizes if size > limit}
    return [f"{name}: {size}" for name, size in large.items() if name not in exceptions] + [
        f"{name}: needs no exception" for name in exceptions if name not in large
    ]


def test_a_cycle_is_found():
    graph = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset("a")}
    assert cycles(graph) == [["a", "b", "c"]]


def test_imports_of_all_kinds_are_counted():
    source = (
        "from typing import TYPE_CHECKING\nimport paceline.core.errors\n"
        "if TYPE_CHECKING:\n    from paceline.core import events\n"
        "def late():\n    from paceline.core.journal import Journal\n"
        "    importlib.import_module('paceline.core.log')\n"
        "    import_module(f'paceline.core.storage.{late}')\n"
        "    import_module(late)\n    import_module(f'{late}.core')\n"
    )
    storage = {name for name in modules() if name.startswith("paceline.core.storage.")}
    assert len(storage) > 3
    assert {*imported(ast.parse(source))} == storage | {
        "paceline.core.errors",
        "paceline.core.events",
        "paceline.core.journal",
        "paceline.core.log",
    }


def test_a_module_that_is_imported_by_a_computed_name_has_a_reason():
    found = {
        module
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if is_import_call(node) and named_import(node) == ("", False)
    }
    assert found == COMPUTED_IMPORTS.keys()


def test_no_module_imports_itself_through_others():
    # The root maps public names to every module and loads each when it is asked for: no part of the graph.
    graph = {name: targets - {"paceline"} for name, targets in arrows().items() if name != "paceline"}
    assert cycles(graph) == []


def test_a_cycle_between_folders_is_found_where_no_module_is_in_one():
    graph = {
        "p.one.a": frozenset({"p.two.b"}),
        "p.two.c": frozenset({"p.one.d"}),
        "p.base": frozenset({"p.one.a"}),
        "p.two.b": frozenset({"p.base"}),
    }
    assert cycles(graph | {"p.base": frozenset()}) == []
    assert cycles(folder_graph("p", graph | {"p.base": frozenset()}, ())) == [["p.one", "p.two"]]
    assert cycles(folder_graph("p", graph | {"p.two.c": frozenset()}, ())) == [["p", "p.one", "p.two"]]
    assert cycles(folder_graph("p", graph | {"p.two.c": frozenset(), "p.two.b": frozenset()}, ())) == []


def test_no_folder_imports_itself_through_others():
    # Every package below the root; import-linter has the layers of the root itself.
    packages = {name.rpartition(".")[0] for name in modules()} - {"", "paceline"}

    def found(built_on: Collection[str]) -> list[list[str]]:
        return [cycle for package in packages for cycle in cycles(folder_graph(package, arrows(), built_on))]

    assert {"paceline.comm", "paceline.train", "paceline.elastic", "paceline.core"} <= packages
    assert found(BUILT_ON_SUBFOLDERS) == []
    needless = [name for name in BUILT_ON_SUBFOLDERS if found(BUILT_ON_SUBFOLDERS.keys() - {name}) == []]
    assert needless == []


@pytest.mark.parametrize(("importer", "target"), GONE)
def test_arrows_that_are_gone_stay_gone(importer: str, target: str):
    def within(module: str, package: str) -> bool:
        return module == package or (package != "paceline" and module.startswith(package + "."))

    assert {importer, target} <= modules().keys()
    assert [
        f"{module} -> {found}"
        for module, targets in arrows().items()
        if within(module, importer)
        for found in sorted(targets)
        if within(found, target)
    ] == []


def test_the_supervisor_has_few_doors():
    package = "paceline.elastic.supervisor"
    found = defaultdict(list)
    for module, targets in arrows().items():
        for target in targets if not module.startswith("paceline.elastic.") else ():
            if target == package or target.startswith(package + "."):
                found[target.removeprefix(package).lstrip(".")].append(module)
    assert {name: importers for name, importers in found.items() if name not in SUPERVISOR_ENTRIES} == {}
    assert SUPERVISOR_ENTRIES.keys() - found.keys() == set()  # a door that is not used is to be closed


def test_files_have_a_size_that_can_be_read_in_one_sitting():
    sizes = ((str(path.relative_to(ROOT)), len(path.read_text().splitlines())) for path in ROOT.rglob("*.py"))
    assert over(sizes, FILE_LINES, {}) == []


def test_functions_fit_on_a_page():
    sizes = ((name, (node.end_lineno or 0) - node.lineno + 1) for name, node in functions())
    assert over(sizes, FUNCTION_LINES, {}) == []


def test_functions_have_few_arguments():
    def count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return sum(argument.arg not in ("self", "cls") for argument in named)

    assert over(((name, count(node)) for name, node in functions()), ARGUMENTS, MANY_ARGUMENTS) == []


def base_names(node: ast.ClassDef) -> list[str]:
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return [ast.unparse(base).rpartition(".")[2] for base in bases]


def all_methods(node: ast.ClassDef, by_name: Mapping[str, ast.ClassDef]) -> set[str]:
    """The methods and properties of a class, those that it inherits from a class of the package too."""
    own = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    return own.union(*(all_methods(by_name[base], by_name) for base in base_names(node) if base in by_name))


def test_inherited_methods_are_counted():
    source = (
        "class A(Protocol):\n def f(self): ...\n def g(self): ...\n"
        "class B(A, Protocol[T]):\n def f(self): ...\n"
    )
    parts = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    assert all_methods(parts["B"], parts) == {"f", "g"}
    assert base_names(parts["B"]) == ["A", "Protocol"]


def test_protocols_have_few_methods():
    # One name stands for one class, so a base is found by its name.
    by_name = {node.name: node for _, node in classes()}
    sizes = (
        (name, len(all_methods(node, by_name))) for name, node in classes() if "Protocol" in base_names(node)
    )
    assert over(sizes, PROTOCOL_METHODS, MANY_METHODS) == []


def named_types(tree: ast.Module) -> Iterator[str]:
    """Classes, and what a module assigns to a name in CapWords: aliases, `Annotated`, `Literal`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and re.fullmatch(
                "_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", target.id
            ):
                yield target.id


def test_classes_and_aliases_are_found():
    source = (
        "Way = int\n_Far: TypeAlias = str\nT = TypeVar('T')\nMOST = 2\nlow = 1\ndef f():\n  class In: ...\n"
    )
    assert sorted(named_types(ast.parse(source))) == ["In", "Way", "_Far"]


def test_one_name_stands_for_one_thing():
    places = defaultdict(list)
    for module, tree in modules().items():
        for name in named_types(tree):
            places[name.lstrip("_")].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
    files = Counter(path.name for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    assert {name for name, times in files.items() if times > 1} == {*SHARED_FILE_NAMES}


def test_every_folder_says_what_it_is_for():
    packages = [path.parent for path in ROOT.rglob("__init__.py")]
    assert [
        str(folder) for folder in packages if not ast.get_docstring(modules()[_module_name(folder)])
    ] == []


def test_no_folder_is_empty():
    packages = {path.parent for path in ROOT.rglob("__init__.py")}
    assert [str(folder) for folder in packages if len([*folder.rglob("*.py")]) == 1] == []


def prose(path: Path) -> Iterator[str]:
    """Docstrings, other strings that stand alone, and comments of a file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def named_modules(text: str, *, is_package: bool = False) -> Iterator[str]:
    """What a text takes for modules: paths that end in .py, `folder/path` and `folder.module` in backticks,
    `some_module.name` in backticks, and every name with an underscore in the docstring of a package."""
    folders = {name.split(".")[1] for name in modules() if "." in name}
    yield from re.findall(r"(?:[a-z_]+/)*\b[a-z_]+\.py\b", text)
    for name in re.findall(r"`([a-z_]+(?:[./][a-z_]+)+)(?:\(\))?`", text):
        first = re.split(r"[./]", name)[0]
        if first in folders or "_" in first or name.startswith("paceline."):
            yield name
    if is_package:
        yield from re.findall(r"(?<![./])\b[a-z]+(?:_[a-z]+)+\b(?![./])", text)


def is_there(name: str) -> bool:
    """Whether a module, a folder, or a name in one of them ends a dotted path of the package."""
    dotted = name.removesuffix(".py").replace("/", ".")
    if any(f".{module}".endswith(f".{dotted}") for module in modules()):
        return True
    owner, _, last = dotted.rpartition(".")
    return not name.endswith(".py") and any(
        f".{module}".endswith(f".{owner}") and _defines(tree, last)
        for module, tree in modules().items()
        if owner
    )


def _defines(tree: ast.Module, name: str) -> bool:
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    # A thin public module passes names of others on.
    named |= {str(a.asname) for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    # The root maps public names to modules.
    return name in named or any(
        isinstance(node, ast.Constant) and node.value == name for node in ast.walk(tree)
    )


def test_modules_named_in_a_text_are_found():
    text = "see `core.journal`, view_change.py, step/transaction.py, `worker_jobs.train_to_end`, `json.loads`"
    assert {*named_modules(text)} == {
        "core.journal",
        "view_change.py",
        "step/transaction.py",
        "worker_jobs.train_to_end",
    }
    assert [*named_modules("    rank_call    a rank", is_package=True)] == ["rank_call"]
    assert all(map(is_there, named_modules(text)))
    gone = ["core.gone", "gone_module.py", "loop/transaction.py", "train_worker.train_to_end", "rank_process"]
    assert not any(map(is_there, gone))


def test_every_module_that_a_docstring_or_a_comment_names_exists():
    found = [
        (str(path.relative_to(ROOT)), name)
        for path in sorted(ROOT.rglob("*.py"))
        for text in prose(path)
        for name in named_modules(text, is_package=path.name == "__init__.py")
    ]
    assert len(found) > 100
    assert [(path, name) for path, name in found if not is_there(name) and name not in NO_MODULES] == []
    assert NO_MODULES.keys() - {name for _, name in found if not is_there(name)} == set()


# Attributes with an underscore that tests use and that are not Paceline's.
FOREIGN_ATTRIBUTES = {
    "_exit": "of os",
    "_indices": "of torch's sparse tensors",
    "_values": "of torch's sparse tensors",
}


def private_accesses(tree: ast.Module) -> Iterator[str]:
    """Attributes with one underscore of anything but `self`, `cls` and torch's modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()") and owner.split(".")[0] != "torch":
                yield f"{owner}.{node.attr}"


def test_private_accesses_are_found():
    source = "a._b\nself._b\ncls._b\nsuper()._b\na.__b__\na.b\nself.a._b = a()._c\ntorch.a._b\nself._a._b\n"
    assert sorted(private_accesses(ast.parse(source))) == ["a()._c", "a._b", "self._a._b", "self.a._b"]


def test_tests_look_at_few_private_attributes():
    """A test of a private attribute fails when the inside changes and the behaviour does not. The limit is
    the present count: the number may only fall, and the limit with it."""
    found = [
        f"{path.relative_to(TESTS)}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name in private_accesses(ast.parse(path.read_text()))
        if name.rpartition(".")[2] not in FOREIGN_ATTRIBUTES
    ]
    assert len(found) <= PRIVATE_ACCESSES, "\n".join(found)


def _module_name(folder: Path) -> str:
    return ".".join(("paceline", *folder.relative_to(ROOT).parts))
