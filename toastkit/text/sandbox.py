"""A Jinja sandbox for untrusted chat templates: no way out, and bounded time and memory.

On top of Jinja's immutable sandbox, which keeps a template away from Python's internals:
- only methods on a list of harmless ones can be reached, so `to_bytes` or `fromkeys` cannot;
- the syntax tree is rewritten so that each loop turn, call, filter, comparison and new value passes
  the budget (toastkit.text.budget), and Jinja's constant folding, which would do work before
  anything is counted, is off;
- what can make a large value of small ones is estimated before it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from types import BuiltinMethodType, CodeType, GeneratorType, MethodType
from typing import Any

from jinja2 import TemplateSyntaxError, ext, nodes, runtime, sandbox
from jinja2.utils import Cycler, Joiner
from jinja2.utils import Namespace as JinjaNamespace
from jinja2.visitor import NodeTransformer

from toastkit.text import sandbox_filters
from toastkit.text.budget import FUNCTIONS, Budget, TooCostly, measure

_STR = """strip lstrip rstrip split rsplit splitlines startswith endswith replace upper lower title
    capitalize casefold swapcase find rfind index rindex count join format partition rpartition
    removeprefix removesuffix isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace
    istitle isupper center ljust rjust zfill"""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STR.split()),
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
    range: frozenset(("index", "count", "start", "stop", "step")),
}
# Their attributes are Jinja's own interface.
_JINJA_OBJECTS = (
    Cycler,
    Joiner,
    runtime.LoopContext,
    runtime.Macro,
    runtime.TemplateReference,
    runtime.BlockReference,
)


class Namespace(JinjaNamespace):
    """Jinja's namespace without names of Python's own, such as `__html__`.

    Does not show its content, because one may hold itself, or much twice.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:  # any name but these is the template's
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        JinjaNamespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise sandbox.SecurityError(f"a namespace takes no name like {name!r}")


# Source -> code, which asks the environment that runs it for everything: a server renders one
# template again and again. Few, because a template may be long.
MOST_COMPILED = 4
_compiled: dict[str, CodeType] = {}


class BudgetedEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox for one rendering, which spends `budget`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, budget: Budget):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self._shown,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        self.budget = budget
        kept: dict[str, Callable] = {**self.filters, **sandbox_filters.replacements(budget)}
        for name in sandbox_filters.REFUSED:
            del kept[name]
        self.filters = {name: self._guarded(f, FUNCTIONS) for name, f in kept.items()}
        self.filters.update(_step=self._step, _made=budget.made, _look=self._look)
        self.filters.update(_concat=self._concat, _slice=self._slice)
        tests: dict[str, Any] = dict(self.tests.items())
        self.tests = {name: self._guarded(f, ()) for name, f in tests.items()}
        del self.globals["lipsum"]
        self.globals["namespace"] = Namespace

    def from_untrusted(self, source: str) -> Any:
        """The compiled template. Raises TooCostly if it is too long, Jinja's errors if broken."""
        if len(source) > 1 << 17:
            raise TooCostly("it is over 128 KiB long")
        code = _compiled.get(source)
        if code is None:
            code = self.compile(_Instrument(self).visit(self.parse(source)))
            if len(_compiled) >= MOST_COMPILED:
                _compiled.clear()
            _compiled[source] = code
        return self.template_class.from_code(self, code, self.make_globals(None))

    # What the compiled template calls instead of Python's own operations.

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        budget = __self.budget
        budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and isinstance(__obj, (BuiltinMethodType, MethodType)):
            sandbox_filters.check_str_method(budget, __obj.__name__, owner, args)
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.step()
        sandbox_filters.check_operation(self.budget, operator, left, right)
        return self.budget.made(super().call_binop(context, operator, left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.step()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, (Namespace, *_JINJA_OBJECTS)):
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS.items())

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """What stands for `value` if it is a str.format: a checked one; None for anything else."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            sandbox_filters.check_format(self.budget, template, (args, kwargs))
            return wrapped(*args, **kwargs)

        return checked

    # Filters that the rewritten tree calls.

    def _step(self, text_size: int) -> bool:
        self.budget.step(text_size)
        return True

    def _look(self, value: Any) -> Any:
        self.budget.step()
        return value

    def _concat(self, *values: Any) -> str:
        self.budget.step()
        self.budget.expect(sum(measure(value, self.budget.size_limit)[0] for value in values))
        return self.budget.made("".join(map(str, map(self._shown, values))))

    def _slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        self.budget.step()
        return self.budget.made(value[start:stop:step])

    def _shown(self, value: Any) -> Any:
        """What `{{ value }}` writes: data, never an object of the program."""
        data = (str, int, float, list, tuple, dict, range, KeysView, ValuesView, ItemsView)
        if value is not None and not isinstance(value, (*data, runtime.Undefined)):
            raise TypeError(f"cannot write a {type(value).__name__} as text")
        self.budget.step()
        return self.budget.made(value)

    def _guarded(self, function: Callable, refused: tuple[type, ...]) -> Callable:
        """A filter or test that passes the budget. Keeps the marks that Jinja reads on it."""

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            for value in args:
                if isinstance(value, refused):
                    raise TypeError(f"a {type(value).__name__} is no data")
            # No generator may hold another: a long chain of them overflows the stack.
            args = tuple(list(a) if type(a) is GeneratorType else a for a in args)
            return self.budget.made(function(*args, **kwargs))

        return guarded

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Jinja writes nothing for it, and fails when it is used. Python's own names fail now."""
        if attribute.startswith("_"):
            name = type(obj).__name__
            raise sandbox.SecurityError(f"access to {attribute!r} of a {name} is not safe")
        return super().unsafe_undefined(obj, attribute)


class GenerationTag(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said; the text stays."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _Instrument(NodeTransformer):
    """Rewrites a template's syntax tree so that what it does passes the budget."""

    def __init__(self, environment: BudgetedEnvironment):
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._count_body(node)
        if node.test is not None:
            turn = self._filter("_step", nodes.Const(0), node.lineno)
            node.test = nodes.And(turn, node.test, lineno=node.lineno)
        return self._count_body(node)

    def _count_body(self, node: Any) -> nodes.Node:
        """Begins a body with a step that charges the text in it."""
        self.generic_visit(node)
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        step = self._filter("_step", nodes.Const(size), node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _count_body

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        message = "a chat template cannot take in another template"
        raise TemplateSyntaxError(message, node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._filter("_look", node.expr, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter("_concat", node.nodes[0], node.lineno, node.nodes[1:])

    def _new_value(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node
        return self._filter("_made", node, node.lineno)

    visit_List = visit_Tuple = visit_Dict = _new_value

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        absent = nodes.Const(None, lineno=node.lineno)
        given = (node.arg.start, node.arg.stop, node.arg.step)
        bounds = [absent if bound is None else bound for bound in given]
        return self._filter("_slice", node.node, node.lineno, bounds)

    def _filter(self, name: str, value: nodes.Expr, line: int, args: Any = ()) -> nodes.Filter:
        found = nodes.Filter(value, name, list(args), [], None, None, lineno=line)
        found.set_environment(self._environment)
        return found
