"""Replace functions that architectures call, `scaled_dot_product_attention(queries, keys, ...)`,
and expressions that have no name, `(y * scores[..., None]).sum(axis=-2)`.

A class whose methods have one of them gets a subclass with rebuilt methods: the same code over a
copy of its module's globals, in which the names refer to our functions; recompiled from source
where an expression becomes a call. The module, mlx_lm and MLX are not changed. Functions of the
module that a method calls are rebuilt with it, also those wrapped by mx.compile, which does nothing
on the CPU: engines turn it off there. What other decorators wrap goes on calling MLX's
functions."""

from __future__ import annotations

import ast
import inspect
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from opcode import opmap
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeGuard

import mlx.core as mx
import mlx.nn as nn

Globals = dict[str, Any]  # globals of a module
Instruction = tuple[int, int]  # opcode and argument
# Our functions by (module, name in it) of what they replace, see `stands_for`.
_OURS: dict[tuple[str, str], Callable[..., Any]] = {}
_patched: dict[int, tuple[Globals, Globals]] = {}  # original and patched, by the id of the former


class Native:
    """Base of all classes that compute natively."""


class _Expression(NamedTuple):
    """pattern: its parameters, each used once, match anything. names, constants, operators: those
    of any code that contains it, constants by repr, operators as instructions."""

    pattern: ast.expr
    parameters: tuple[str, ...]
    names: frozenset[str]
    constants: frozenset[str]
    operators: frozenset[Instruction]
    ours: Callable[..., Any]


_EXPRESSIONS: dict[str, _Expression] = {}  # by the name of the global that is called
COMPILED = type(mx.compile(lambda x: x))
# Put before a recompiled function: names imported in the same module compile differently.
IMPORTS = ast.parse("import mlx.core as mx, mlx.nn as nn").body
BINARY = frozenset(code for name, code in opmap.items() if name.startswith("BINARY_"))


def stands_for(module: str, name: str) -> Callable[[Any], Any]:
    """Decorate a function that is called in place of one of mlx or mlx_lm, given its module and its
    name there, which may be dotted: stands_for("mlx.core", "fast.rms_norm"). Same parameters."""

    def register(ours: Any) -> Any:
        _OURS[module, name] = ours
        _clear_caches()
        return ours

    return register


def our_function(module: str, name: str) -> Callable[..., Any] | None:
    """Return what is called in place of a function of mlx or mlx_lm, or None."""
    return _OURS.get((module, name))


def replaces(expression: str) -> Callable[[Any], Any]:
    """Decorate a function that is called in place of an expression, in which its parameters match
    anything and `mx` is mlx.core: replaces("mx.exp(x) - 1") for a function of x."""

    def register(ours: Any) -> Any:
        code, parameters = (
            compile(expression, "", "eval"),
            tuple(inspect.signature(ours).parameters),
        )
        names = frozenset(code.co_names).difference(parameters)
        _EXPRESSIONS[f"_toastkit_{ours.__name__}"] = _Expression(
            ast.parse(expression, mode="eval").body, parameters, names,
            frozenset(map(repr, code.co_consts)), frozenset(_operators(code)), ours,
        )  # fmt: skip
        _clear_caches()
        return ours

    return register


@cache
def under_its_name(base: type, /, *mixins: type, **own: Any) -> type:
    """A subclass of a class and mixins with the class's name and module, by which architectures,
    sessions and savepoints look for it."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (*mixins, base), {**names, **own})


def _clear_caches() -> None:
    rebuilt_methods.cache_clear()
    _rebuilt_code.cache_clear()
    _definitions.cache_clear()
    _patched.clear()


@cache
def rebuilt_methods(cls: type[nn.Module]) -> dict[str, FunctionType]:
    """Rebuild the methods of an architecture's class that call functions we replace; by name."""
    rebuilt: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, nn.Module) or base.__module__.startswith("mlx."):
            continue
        for name, method in vars(base).items():
            rebuilt.pop(name, None)  # overridden
            if isinstance(method, FunctionType) and _needs_rebuilding(method):
                rebuilt[name] = _with_globals(method, _patched_globals(method.__globals__))
    return rebuilt


def _needs_rebuilding(function: FunctionType) -> bool:
    """True if it, or a function of its module that it calls, has something to replace."""
    return _uses_ours(function) or any(map(_uses_ours, functions_of([function])))


def _uses_ours(function: FunctionType) -> bool:
    """True if its own code has an expression or a name that we replace."""
    if _rebuilt_code(function) is not function.__code__:
        return True
    names, namespace = {*_names(function.__code__)}, function.__globals__
    values = [namespace[name] for name in names if name in namespace]
    originals = _originals()
    return any(id(value) in originals for value in values) or any(
        any(value is sys.modules.get(module) for value in values)
        and names.issuperset(name.split("."))
        for module, name in _OURS
    )


def _is_own_function(namespace: Globals, value: Any) -> TypeGuard[FunctionType]:
    """True for a plain or compiled function of the module itself."""
    return isinstance(value, (FunctionType, COMPILED)) and value.__globals__ is namespace


def functions_of(callers: Sequence[FunctionType]) -> list[FunctionType]:
    """Functions of their own module that these call, directly or not, each once."""
    found: list[FunctionType] = []
    pending = [*callers]
    while pending:
        namespace = (caller := pending.pop(0)).__globals__
        for name in dict.fromkeys(_names(caller.__code__)):
            called: Any = namespace.get(name)
            if _is_own_function(namespace, called) and called not in (*found, *callers):
                found.append(called)
                pending.append(called)
    return found


def _names(code: CodeType) -> Iterator[str]:
    """Globals and attributes named in code and in functions nested in it."""
    return (name for one in _codes(code) for name in one.co_names)


def _operators(code: CodeType) -> Iterator[Instruction]:
    """Binary operators of the code and of functions nested in it, see BINARY."""
    for one in _codes(code):
        pairs = zip(one.co_code[::2], one.co_code[1::2])
        yield from (pair for pair in pairs if pair[0] in BINARY)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code and that of functions nested in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def _originals() -> dict[int, Callable[..., Any]]:
    """Our functions by the id of what they replace, for modules that are imported."""
    originals = {}
    for (module, name), ours in _OURS.items():
        value: Any = sys.modules.get(module)
        for word in name.split("."):
            value = getattr(value, word, None)
        if value is not None:
            originals[id(value)] = ours
    return originals


def _patched_globals(original: Globals) -> Globals:
    """A copy of the globals of an architecture's module that refers to our functions."""
    if id(original) not in _patched:
        originals, patched = _originals(), dict(original)
        patched.update({name: expression.ours for name, expression in _EXPRESSIONS.items()})
        _patched[id(original)] = original, patched
        for name, value in original.items():
            if id(value) in originals:
                patched[name] = originals[id(value)]
            elif isinstance(value, ModuleType):
                patched[name] = _patched_module(value)
            elif _is_own_function(original, value) and _needs_rebuilding(value):
                patched[name] = _with_globals(value, patched)
    return _patched[id(original)][1]


def _patched_module(module: ModuleType) -> ModuleType:
    """A copy of a module of MLX with our functions; the module itself if it has none of them."""
    ours = {name: f for (where, name), f in _OURS.items() if where == module.__name__}
    return _patched_copy(module, ours) if ours else module


def _patched_copy(module: ModuleType, ours: Mapping[str, Callable[..., Any]]) -> ModuleType:
    copy = ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module))
    for name, function in ours.items():
        first, _, rest = name.partition(".")
        setattr(
            copy, first, _patched_copy(getattr(copy, first), {rest: function}) if rest else function
        )
    return copy


def _with_globals(function: FunctionType, namespace: Globals) -> FunctionType:
    """The same function over other globals."""
    code = _rebuilt_code(function)
    rebuilt = FunctionType(
        code, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    rebuilt.__qualname__, rebuilt.__doc__ = function.__qualname__, function.__doc__
    vars(rebuilt).update(function.__dict__)
    return rebuilt


@cache
def _rebuilt_code(function: FunctionType) -> CodeType:
    """The function's code with expressions replaced by calls; its own code if it has none of them,
    is nested in another function, or has no source that compiles to the same."""
    code = function.__code__
    names, constants = {*_names(code)}, {*map(repr, code.co_consts)}
    operators = {*_operators(code)}
    candidates = {
        name: e
        for name, e in _EXPRESSIONS.items()
        if e.names <= names and e.constants <= constants and e.operators <= operators
    }
    namespace = function.__globals__
    plain_modules = namespace.get("mx") is mx and namespace.get("nn", nn) is nn
    if not candidates or not plain_modules or code.co_freevars:
        return code
    if (definition := definition_of(code)) is None:
        return code
    definition.tree.decorator_list = []
    changed = _Replacer(candidates)
    tree = ast.Module([*IMPORTS, changed.visit(definition.tree)], [])
    compiled = compile(ast.fix_missing_locations(tree), code.co_filename, "exec")
    consts = (c for c in compiled.co_consts if isinstance(c, CodeType))
    rebuilt = next(c for c in consts if c.co_name == code.co_name)
    stale = {*rebuilt.co_names} - {
        *code.co_names,
        *candidates,
    } or rebuilt.co_varnames != code.co_varnames
    return rebuilt if changed.count and not stale else code


class Definition(NamedTuple):
    """The definition of a function. text: its lines, those of decorators included."""

    tree: ast.FunctionDef
    text: str


def definition_of(code: CodeType) -> Definition | None:
    """Find the source of a function's code; None if there is none."""
    definition = _definitions(code.co_filename).get(code.co_firstlineno)
    return definition if definition is not None and definition.tree.name == code.co_name else None


@cache
def _definitions(path: str) -> dict[int, Definition]:
    """Definitions in a file by their first line. inspect.getsource would search all modules for
    each of them, and tokenise it."""
    try:
        with tokenize.open(path) as file:
            lines = file.readlines()
        pending: list[ast.AST] = [ast.parse("".join(lines))]
    except (OSError, SyntaxError, ValueError):
        return {}
    definitions = {}
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(word.lineno for word in node.decorator_list)])
            definitions[first] = Definition(node, "".join(lines[first - 1 : node.end_lineno]))
        for block in ("body", "orelse", "handlers", "finalbody"):  # of statements, not expressions
            pending += getattr(node, block, ())
    return definitions


class _Replacer(ast.NodeTransformer):
    """Replaces expressions by calls. count: of replacements."""

    def __init__(self, expressions: Mapping[str, _Expression]):
        self.count = 0
        self._expressions = expressions

    def visit(self, node: ast.AST) -> Any:
        node = super().visit(node)
        for name, expression in self._expressions.items():
            parameters: dict[str, Any] = dict.fromkeys(expression.parameters)
            if isinstance(node, ast.expr) and _matches(expression.pattern, node, parameters):
                self.count += 1
                called = ast.Name(name, ast.Load())
                return ast.copy_location(ast.Call(called, [*parameters.values()], []), node)
        return node


def _matches(pattern: Any, node: Any, parameters: dict[str, Any]) -> bool:
    """True if a subtree matches a pattern; sets `parameters` to the nodes in their place."""
    if isinstance(pattern, ast.Name) and pattern.id in parameters:
        parameters[pattern.id] = node
        return True
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(
            _matches(a, b, parameters) for a, b in zip(pattern, node)
        )
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    return type(pattern) is type(node) and all(
        _matches(getattr(pattern, field), getattr(node, field), parameters)
        for field in pattern._fields
    )
