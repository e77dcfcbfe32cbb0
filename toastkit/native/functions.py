"""Functions that architectures call by name: `scaled_dot_product_attention(queries, keys, ...)`;
and expressions that they have no name for: `(y * scores[..., None]).sum(axis=-2)`.

A class whose methods have one of them gets a class derived from it, with these methods made anew:
the same code, over a copy of its module's globals in which the names stand for ours; compiled from
its source where an expression becomes a call. The module, mlx_lm and MLX stay as they are. What a
method calls by way of functions of its own module is made anew with it, also of what mx.compile
makes of them, which is nothing on the CPU: engines turn it off there. What any other decorator has
wrapped goes on calling MLX's.
"""

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

Space = dict[str, Any]  # globals of a module
Instruction = tuple[int, int]  # with what it is about
# Of (module, name in it), by what is called instead, with the same parameters: see `stands_for`.
_OURS: dict[tuple[str, str], Callable[..., Any]] = {}
_spaces: dict[int, tuple[Space, Space]] = {}  # by the id of the first


class Native:
    """What all classes that compute natively are known by."""


class _Expression(NamedTuple):
    """form: the parameters, each once, stand for anything. names, constants, operators: that code
    with it has, the second as they are written, the last as instructions."""

    form: ast.expr
    parameters: tuple[str, ...]
    names: frozenset[str]
    constants: frozenset[str]
    operators: frozenset[Instruction]
    ours: Callable[..., Any]


_EXPRESSIONS: dict[str, _Expression] = {}  # by the name of the global that is called
COMPILED = type(mx.compile(lambda x: x))
# Before a function: of what is imported beside it Python makes other instructions.
IMPORTS = ast.parse("import mlx.core as mx, mlx.nn as nn").body
BINARY = frozenset(code for name, code in opmap.items() if name.startswith("BINARY_"))


def stands_for(module: str, name: str) -> Callable[[Any], Any]:
    """Has a function called in place of one of mlx or mlx_lm, by its module and its name there,
    which may be of one in it: stands_for("mlx.core", "fast.rms_norm")."""

    def register(ours: Any) -> Any:
        _OURS[module, name] = ours
        _forget()
        return ours

    return register


def our_function(module: str, name: str) -> Callable[..., Any] | None:
    """What is called in place of one of mlx or mlx_lm; None for nothing."""
    return _OURS.get((module, name))


def replaces(expression: str) -> Callable[[Any], Any]:
    """Has a function called in place of an expression, in which its parameters are anything and
    `mx` is mlx.core: replaces("mx.exp(x) - 1") of a function of x."""

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
        _forget()
        return ours

    return register


def _forget() -> None:
    methods_anew.cache_clear()
    _code_anew.cache_clear()
    _definitions.cache_clear()
    _spaces.clear()


@cache
def methods_anew(cls: type[nn.Module]) -> dict[str, FunctionType]:
    """The methods of a class of an architecture that call what we have, made anew, by name. Empty
    where there are none."""
    made: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, nn.Module) or base.__module__.startswith("mlx."):
            continue
        for name, method in vars(base).items():
            made.pop(name, None)  # overridden
            if isinstance(method, FunctionType) and _calls_ours(method):
                made[name] = _over(method, _space_of(method.__globals__))
    return made


def _calls_ours(function: FunctionType) -> bool:
    """By itself, or through functions of its module."""
    return _names_ours(function) or any(map(_names_ours, functions_of([function])))


def _names_ours(function: FunctionType) -> bool:
    """Whether it has an expression or a name that ours stands for."""
    if _code_anew(function) is not function.__code__:
        return True
    names, space = {*_names(function.__code__)}, function.__globals__
    values = [space[name] for name in names if name in space]
    originals = _originals()
    return any(id(value) in originals for value in values) or any(
        any(value is sys.modules.get(module) for value in values)
        and names.issuperset(name.split("."))
        for module, name in _OURS
    )


def _is_of(space: Space, value: Any) -> TypeGuard[FunctionType]:
    """Whether it is a function of a module's own, plain or compiled."""
    return isinstance(value, (FunctionType, COMPILED)) and value.__globals__ is space


def functions_of(callers: Sequence[FunctionType]) -> list[FunctionType]:
    """What they call of their own module's functions, and these of others, each once."""
    found: list[FunctionType] = []
    pending = [*callers]
    while pending:
        space = (caller := pending.pop(0)).__globals__
        for name in dict.fromkeys(_names(caller.__code__)):
            called: Any = space.get(name)
            if _is_of(space, called) and called not in (*found, *callers):
                found.append(called)
                pending.append(called)
    return found


def _names(code: CodeType) -> Iterator[str]:
    """Globals and attributes that code names, that of functions within it included."""
    return (name for one in _codes(code) for name in one.co_names)


def _operators(code: CodeType) -> Iterator[Instruction]:
    """Binary operations of code, with that of functions within it: see BINARY."""
    for one in _codes(code):
        pairs = zip(one.co_code[::2], one.co_code[1::2])
        yield from (pair for pair in pairs if pair[0] in BINARY)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of functions within it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def _originals() -> dict[int, Callable[..., Any]]:
    """Ours by the id of what they stand for, as far as its module is imported."""
    found = {}
    for (module, name), ours in _OURS.items():
        value: Any = sys.modules.get(module)
        for word in name.split("."):
            value = getattr(value, word, None)
        if value is not None:
            found[id(value)] = ours
    return found


def _space_of(theirs: Space) -> Space:
    """The globals that stand for those of an architecture's module."""
    if id(theirs) not in _spaces:
        originals, made = _originals(), dict(theirs)
        made.update({name: expression.ours for name, expression in _EXPRESSIONS.items()})
        _spaces[id(theirs)] = theirs, made
        for name, value in theirs.items():
            if id(value) in originals:
                made[name] = originals[id(value)]
            elif isinstance(value, ModuleType):
                made[name] = _module_anew(value)
            elif _is_of(theirs, value) and _calls_ours(value):
                made[name] = _over(value, made)
    return _spaces[id(theirs)][1]


def _module_anew(module: ModuleType) -> ModuleType:
    """A copy of a module of MLX in which ours are; the module where it has none of them."""
    ours = {name: f for (where, name), f in _OURS.items() if where == module.__name__}
    return _copied(module, ours) if ours else module


def _copied(module: ModuleType, ours: Mapping[str, Callable[..., Any]]) -> ModuleType:
    copy = ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module))
    for name, function in ours.items():
        first, _, rest = name.partition(".")
        setattr(copy, first, _copied(getattr(copy, first), {rest: function}) if rest else function)
    return copy


def _over(function: FunctionType, space: Space) -> FunctionType:
    """The same function over other globals."""
    code = _code_anew(function)
    made = FunctionType(code, space, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
    vars(made).update(function.__dict__)
    return made


@cache
def _code_anew(function: FunctionType) -> CodeType:
    """With calls of ours for expressions; its code where it has none, or no source that says what
    it does, or where it is part of another function."""
    code = function.__code__
    names, constants = {*_names(code)}, {*map(repr, code.co_consts)}
    operators = {*_operators(code)}
    found = {
        name: e
        for name, e in _EXPRESSIONS.items()
        if e.names <= names and e.constants <= constants and e.operators <= operators
    }
    space = function.__globals__
    theirs = space.get("mx") is mx and space.get("nn", nn) is nn
    if not found or not theirs or code.co_freevars:
        return code
    if (definition := definition_of(code)) is None:
        return code
    definition.tree.decorator_list = []
    changed = _Replaced(found)
    tree = ast.Module([*IMPORTS, changed.visit(definition.tree)], [])
    compiled = compile(ast.fix_missing_locations(tree), code.co_filename, "exec")
    consts = (c for c in compiled.co_consts if isinstance(c, CodeType))
    made = next(c for c in consts if c.co_name == code.co_name)
    stale = {*made.co_names} - {*code.co_names, *found} or made.co_varnames != code.co_varnames
    return made if changed.count and not stale else code


class Definition(NamedTuple):
    """Of a function. text: its lines, those of decorators included."""

    tree: ast.FunctionDef
    text: str


def definition_of(code: CodeType) -> Definition | None:
    """Where a function's code was compiled from; None where there is no source that has it."""
    found = _definitions(code.co_filename).get(code.co_firstlineno)
    return found if found is not None and found.tree.name == code.co_name else None


@cache
def _definitions(path: str) -> dict[int, Definition]:
    """Those in a file, by the line in which they begin. inspect.getsource would look at all modules
    for each of them, and split it into tokens."""
    try:
        with tokenize.open(path) as file:
            lines = file.readlines()
        pending: list[ast.AST] = [ast.parse("".join(lines))]
    except (OSError, SyntaxError, ValueError):
        return {}
    found = {}
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(word.lineno for word in node.decorator_list)])
            found[first] = Definition(node, "".join(lines[first - 1 : node.end_lineno]))
        for block in ("body", "orelse", "handlers", "finalbody"):  # of statements, not expressions
            pending += getattr(node, block, ())
    return found


class _Replaced(ast.NodeTransformer):
    """Puts calls in place of expressions. count: of them."""

    def __init__(self, expressions: Mapping[str, _Expression]):
        self.count = 0
        self._expressions = expressions

    def visit(self, node: ast.AST) -> Any:
        node = super().visit(node)
        for name, expression in self._expressions.items():
            parameters: dict[str, Any] = dict.fromkeys(expression.parameters)
            if isinstance(node, ast.expr) and _matches(expression.form, node, parameters):
                self.count += 1
                called = ast.Name(name, ast.Load())
                return ast.copy_location(ast.Call(called, [*parameters.values()], []), node)
        return node


def _matches(form: Any, node: Any, parameters: dict[str, Any]) -> bool:
    """Whether a part of a tree has a form. parameters: take what stands in their places."""
    if isinstance(form, ast.Name) and form.id in parameters:
        parameters[form.id] = node
        return True
    if isinstance(form, list):
        return len(form) == len(node) and all(
            _matches(a, b, parameters) for a, b in zip(form, node)
        )
    if not isinstance(form, ast.AST):
        return type(form) is type(node) and form == node
    return type(form) is type(node) and all(
        _matches(getattr(form, field), getattr(node, field), parameters) for field in form._fields
    )
