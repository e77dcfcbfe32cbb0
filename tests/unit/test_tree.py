"""The shape of the tree: which way imports point, how large things get."""

from __future__ import annotations

import ast
import gc
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from toastkit.commands import COMMANDS, program_name

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "toastkit"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
CPP = sorted([*PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h")])
NAMES = [command.name for command in COMMANDS]
PEOPLE = {"model", "perplexity", "toast", "toasted"}  # commands without a shim in bin/

# A folder imports from those below its own line, and from its own line where that makes no circle.
LEVELS = (
    {"commands"},
    {"client"},
    {"daemon"},
    {"stages"},
    {"engine"},
    {"gears", "residency", "experts"},
    {"holdings"},
    {"store", "model", "session", "native"},
    {
        "frames", "arrays", "outline", "errors", "base_directories", "private_files", "interrupts",
        "descriptors", "heap", "threads", "prefix", "wire", "text", "sampling", "__init__",
    },
)  # fmt: skip
LEVEL = {folder: n for n, level in enumerate(LEVELS) for folder in level}

MAX_FILE_LINES, MAX_FUNCTION_LINES, COLUMNS = 400, 60, 100
# What is still longer: "path" or "path:function". Sorted; it may only shrink.
LONGER: tuple[str, ...] = ()


def parsed(path: Path) -> ast.Module:
    """What a file consists of. Collecting meanwhile takes four times as long as parsing."""
    gc.disable()
    try:
        return ast.parse(path.read_bytes())
    finally:
        gc.enable()


tree_of = cache(parsed)  # of the sources, which are looked at again and again


@cache
def nodes_of(path: Path) -> list[ast.stmt]:
    """The statements of a source, nested ones too: imports and definitions are nowhere else."""
    found, new = [], [*tree_of(path).body]
    while new:
        found += new
        blocks = [getattr(node, name, ()) for node in new
                  for name in ("body", "orelse", "finalbody", "handlers", "cases")]  # fmt: skip
        new = [node for block in blocks for node in block]
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def folder_of(module: str) -> str:
    """The folder, or the file, directly under toastkit that a module belongs to."""
    return (module.split(".") + ["__init__"])[1]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in SOURCES}


@cache
def imports(path: Path) -> set[str]:
    """All modules that a file imports, wherever in it the import stands."""
    package, found = module_name(path).split("."), set()
    if path.name != "__init__.py":
        package = package[:-1]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            names = {".".join([*base, alias.name]) for alias in node.names}
            found |= {name if name in MODULES else ".".join(base) for name in names}
    return found


@cache
def arrows() -> dict[tuple[str, str], set[str]]:
    """(from, to) of folders -> the files in which that import stands."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in SOURCES:
        here = folder_of(module_name(path))
        for name in imports(path):
            there = folder_of(name)
            if name.split(".")[0] == "toastkit" and there != here:
                found.setdefault((here, there), set()).add(relative(path))
    return found


def test_imports_point_downwards() -> None:
    wrong = {
        f"{here} -> {there}": sorted(files)
        for (here, there), files in arrows().items()
        if LEVEL[here] > LEVEL[there]
    }
    assert not wrong


def test_folders_do_not_import_in_a_circle() -> None:
    pairs = set(arrows())
    graph = {here: {there for a, there in pairs if a == here} for here, _ in pairs}
    while graph:
        free = [here for here, needs in graph.items() if not needs & set(graph)]
        assert free, f"a circle among {sorted(graph)}"
        for here in free:
            del graph[here]


def test_native_imports_point_downwards() -> None:
    """As the docstring of toastkit/native says."""
    floors = ("forms", "modules", "layers", "known", "replacing")

    def floor(module: str) -> int:
        """Of what is not named: below them all."""
        return next((n for n, name in enumerate(floors) if name == module.split(".")[2]), -1)

    for path in (PACKAGE / "native").rglob("*.py"):
        if len(module_name(path).split(".")) > 2:
            for name in imports(path):
                if not name.startswith("toastkit.native."):
                    continue
                assert floor(name) <= floor(module_name(path)), f"{relative(path)}: {name}"


@cache
def names_in(path: Path) -> set[str]:
    """What others can import from a file."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def test_what_benchmarks_import_is_there() -> None:
    """And what they take of a module: they are run by hand, some of them seldom."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        modules: dict[str, Path] = {}
        for node in [*nodes_of(path), *in_programs(path)]:
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            place = ROOT / node.module.replace(".", "/")
            beside = path.with_name(f"{node.module}.py")
            files = [f for f in (beside, place.with_suffix(".py"), place / "__init__.py")
                     if f.is_file()]  # fmt: skip
            ours = node.module.startswith(("toastkit", "tests"))
            assert files or not ours, f"{relative(path)}: {node.module}"
            for alias in node.names if files else ():
                module = (place / alias.name).with_suffix(".py")
                if module.is_file():
                    modules[alias.asname or alias.name] = module
                where = f"{relative(path)}: {node.module}.{alias.name}"
                assert module.is_file() or alias.name in names_in(files[0]), where
        for name, taken in taken_of_modules(path):
            assert name not in modules or taken in names_in(modules[name]), f"{path.name}: {taken}"


def in_programs(path: Path) -> Iterator[ast.stmt]:
    """The statements of programs that a file has as texts, for processes of their own."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and "\nfrom toastkit." in str(node.value):
            yield from ast.parse(str(node.value)).body


def taken_of_modules(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, attribute) of what may be modules: in `name.attribute`, and as patch.object has
    them."""
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=taken):
                yield name, taken
            case ast.Call(
                func=ast.Attribute(attr="object"),
                args=[ast.Name(id=name), ast.Constant(value=str(taken)), *_],
            ):
                yield name, taken


def module_level(path: Path) -> Iterator[str]:
    """What importing a file imports."""
    for node in tree_of(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def test_the_base_imports_no_engine() -> None:
    """Nothing in the base needs MLX to be imported."""
    base = [p for p in SOURCES if LEVEL[folder_of(module_name(p))] == len(LEVELS) - 1]
    assert len(base) > 10
    for path in base:
        roots = {name.split(".")[0] for name in module_level(path)}
        heavy = roots & {"mlx", "mlx_lm", "transformers", "huggingface_hub"}
        assert not heavy, relative(path)


def test_nothing_imports_transformers_or_runs_foreign_code() -> None:
    for path in SOURCES:
        for name in imports(path):
            assert name.split(".")[0] not in ("transformers", "pickle", "torch", "marshal")


# -------------------------------------------------------------------------------------------- sizes


def functions(tree: ast.AST, prefix: str = "", public: bool = True) -> Iterator[tuple]:
    """(qualified name, node, enclosing class or None, public) of functions and methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            owner = tree if isinstance(tree, ast.ClassDef) else None
            visible = public and not node.name.startswith("_")
            yield prefix + node.name, node, owner, visible
            yield from functions(node, f"{prefix}{node.name}.", False)
        elif isinstance(node, ast.ClassDef):
            visible = public and not node.name.startswith("_")
            yield from functions(node, f"{prefix}{node.name}.", visible)
        elif not isinstance(node, ast.expr):
            yield from functions(node, prefix, public)


def lines_of(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


def test_nothing_grows_too_long_and_every_file_says_what_it_is_about() -> None:
    long, wide, silent = [], [], []
    for path in [*SOURCES, *TESTS, *CPP]:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MAX_FILE_LINES:
            long.append(relative(path))
        wide += [f"{relative(path)}: {x}" for x in text.splitlines() if len(x) > COLUMNS]
        if path.suffix == ".py" and text.strip():
            tree = parsed(path) if path in TESTS else tree_of(path)
            if not ast.get_docstring(tree):
                silent.append(relative(path))
            for name, node, _, _ in functions(tree):
                if lines_of(node) > MAX_FUNCTION_LINES:
                    long.append(f"{relative(path)}:{name}")
    assert sorted(long) == list(LONGER)
    assert not wide + silent


def test_public_functions_say_what_they_do() -> None:
    """Those over 8 lines. A command's help text is its summary; a method of a protocol is told of
    where the protocol is."""
    told, silent = set(), []
    for path in SOURCES:
        for name, node, owner, visible in functions(tree_of(path)):
            protocol = owner and any(getattr(b, "id", "") == "Protocol" for b in owner.bases)
            if protocol and ast.get_docstring(node):
                told.add(node.name)
            command = any("cli.command" in ast.unparse(d) for d in node.decorator_list)
            if visible and not command and lines_of(node) > 8 and not ast.get_docstring(node):
                silent.append((node.name, owner is not None, f"{relative(path)}:{name}"))
    assert not [where for name, method, where in silent if not (method and name in told)]


# Where every public function over arrays says their shape and dtype. It may only grow.
SHAPED = (
    "toastkit/engine/", "toastkit/experts/", "toastkit/gears/", "toastkit/holdings/",
    "toastkit/native/",
    "toastkit/sampling/", "toastkit/session/", "toastkit/stages/", "toastkit/store/",
)  # fmt: skip
SHAPE = re.compile(r"\((\.\.\.|[\w.+* ]+(,|(, [\w.+* ]+)+))\)|\bscalar\b")
DTYPE = re.compile(r"\b(float|uint|int|bool|bfloat16|dtype)\d*\b")


def test_functions_over_arrays_say_shape_and_dtype() -> None:
    """In their docstring or their class's."""
    silent, held = [], 0
    for path in [path for path in SOURCES if relative(path).startswith(SHAPED)]:
        for name, node, owner, visible in functions(tree_of(path)):
            hints = [a.annotation for a in (*node.args.args, *node.args.kwonlyargs)]
            text = " ".join(ast.unparse(hint) for hint in (*hints, node.returns) if hint)
            if visible and re.search(r"\b(np\.ndarray|mx\.array)\b", text):
                held += 1
                about = (ast.get_docstring(node) or "") + (owner and ast.get_docstring(owner) or "")
                if not (SHAPE.search(about) and DTYPE.search(about)):
                    silent.append(f"{relative(path)}:{name}")
    assert not silent and held > 20


def tracked_texts() -> Iterator[tuple[str, str]]:
    """Path and content of every text that belongs to the project."""
    folders = ("toastkit", "tests", "bin", "examples", "benchmarks", "man", ".ci")
    paths = [p for folder in folders for p in sorted((ROOT / folder).rglob("*"))]
    paths += sorted((ROOT / "docs").glob("*")) + sorted(ROOT.glob("*.*")) + [ROOT / "Makefile"]
    for path in paths:
        odd = {"__pycache__", ".git"}.intersection(path.parts)
        odd |= {path.suffix}.intersection((".safetensors", ".png", ".pyc"))
        if path.is_file() and not odd and path.stat().st_size < 1 << 20:
            yield relative(path), path.read_text(encoding="utf-8")


def test_no_paths_of_one_machine_and_no_unfinished_notes() -> None:
    # Put together here, so that this file does not find itself.
    paths = re.compile("(?<![\\w.~])/" + r"(work|tmp|root|home|Users)/\w")
    notes = re.compile(
        r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b"
    )
    found = [
        f"{name}:{number}"
        for name, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if paths.search(line) or notes.search(line)
    ]
    assert not found


# ---------------------------------------------------------------------------- the table of commands


def test_the_table_names_what_there_is() -> None:
    """The command table, the installed scripts, bin/ and the files in commands/ agree."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.scripts]")[1].split("\n[")[0]
    scripts = dict(re.findall(r'^(toast[\w-]*) = "([\w.:]+)"$', section, re.M))
    assert scripts == {
        program_name(n): f"toastkit.commands.{n.replace('-', '_')}:main" for n in NAMES
    }
    with_main = {
        path.stem.replace("_", "-")
        for path in (PACKAGE / "commands").glob("*.py")
        if any(name == "main" for name, *_ in functions(tree_of(path)))
    }
    assert with_main == set(NAMES)
    assert {path.name for path in (ROOT / "bin").iterdir()} == set(NAMES) - PEOPLE
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", sorted(set(NAMES) - PEOPLE))
def test_the_shims_of_a_checkout(name: str) -> None:
    shim = ROOT / "bin" / name
    assert os.access(shim, os.X_OK)
    lines = shim.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3 and lines[0] == "#!/bin/sh"
    assert lines[2].endswith(f'/../.venv/bin/toast-{name}" "$@"')


def test_summaries_are_one_line_in_lower_case() -> None:
    for command in COMMANDS:
        assert re.fullmatch(r"[a-z][^.\n]{9,69}", command.summary), command.name


def test_the_tests_of_make_quick_exist() -> None:
    """pytest runs none at all if one of them is gone."""
    for line in (ROOT / "tests/quick.txt").read_text().splitlines():
        path, _, name = line.rpartition(" ")[2].rpartition("=")[2].partition("::")
        if path.startswith("tests/"):
            assert (ROOT / path).exists(), line
            assert not name or f"def {name.split('[')[0]}(" in (ROOT / path).read_text(), line
