"""Turns a `@triton.jit` function into a Python function over the simulator's values.

The source stays as it is but for: calls of operations at which a task may hand over, and of
functions that have such calls, become `yield from`; the bodies of `tlx.async_task` become closures;
variables that a loop carries become runtime values, as in Triton. Line numbers are kept.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra import libdevice

from gem.attention.simulator import (
    assembly,
    clc,
    context,
    copies,
    elementwise,
    extension,
    language,
    remote,
    spins,
    tasks,
    tcgen05,
)
from gem.attention.simulator.errors import UnsupportedOperation
from gem.attention.simulator.namespace import Namespace, operations
from gem.attention.simulator.values import Value, value

_READING = ("load", "local_load", "load_tensor_descriptor")  # also as methods
_ATOMICS = [x for name, x in vars(language).items() if name.startswith("atomic_")]
_NAMED = ("local_alloc", "alloc_barriers", "alloc_warp_barrier")


class _Marker:
    """Stands for `tlx.async_tasks` and `tlx.async_task` while a function is compiled."""


ASYNC_TASKS, ASYNC_TASK = _Marker(), _Marker()

TL_OPERATIONS = operations(language)
TL = Namespace("tl", tl, TL_OPERATIONS)
TL.math = Namespace("tl.math", tl.math, TL_OPERATIONS)
vars(TL).update(elementwise.PACKED)
TL.inline_asm_elementwise = assembly.inline_asm_elementwise
TLX = Namespace(
    "tlx", tlx,
    {k: x for module in (extension, copies, remote, clc) for k, x in operations(module).items()},
)  # fmt: skip
TLX.tcgen05_commit = tcgen05.tcgen05_commit
TLX.async_tasks, TLX.async_task = ASYNC_TASKS, ASYNC_TASK
TRITON = Namespace(
    "triton", triton, {"language": TL, "cdiv": language.cdiv,
                       "next_power_of_2": triton.next_power_of_2},
)  # fmt: skip
_MODULES = {
    "triton": TRITON,
    "triton.language": TL,
    "triton.language.core": TL,
    "triton.language.math": TL.math,
    "triton.language.extra.libdevice": Namespace("libdevice", libdevice, TL_OPERATIONS),
    "triton.language.extra.tlx": TLX,
}


class Missing:
    """A variable that a task's own copy would have, had it been set."""


def carried(x):
    """A Python number that a loop carries, as a runtime value."""
    return value(x) if isinstance(x, bool | int | float) else x


_BUILTINS = {
    "range": language.range,
    "min": lambda *x: functools.reduce(_smaller, x),
    "max": lambda *x: functools.reduce(_larger, x),
    "_sim_carried": carried,
    "_sim_missing": Missing,
    "_sim_spec": tasks.Spec,
    "_sim_run": tasks.run,
    "_sim_turn": spins.turn,
}


def _smaller(a, b):
    return language.minimum(a, b) if isinstance(a, Value) or isinstance(b, Value) else min(a, b)


def _larger(a, b):
    return language.maximum(a, b) if isinstance(a, Value) or isinstance(b, Value) else max(a, b)


class Compiled:
    """A function of the kernel, to be called with the simulator's values.

    Attributes:
        call: the function; a generator function if `switches`.
        switches: whether a task may hand over in it.
    """

    def __init__(self, name: str):
        self.name, self.call, self.switches = name, None, False


class _Recursion:
    """A function in its own body, where it is not compiled yet."""

    def __init__(self, function: Compiled):
        self.function = function

    def __call__(self, *args, **keywords):
        return self.function.call(*args, **keywords)


_compiled: dict[object, Compiled] = {}


def compiled(function) -> Compiled:
    """The compiled form of a JITFunction (or a plain Python function that is one's source)."""
    python = getattr(function, "fn", function)
    while hasattr(python, "fn"):
        python = python.fn
    if python not in _compiled:
        _compiled[python] = entry = Compiled(python.__name__)
        try:
            _compile(python, entry)
        except BaseException:
            del _compiled[python]
            raise
    return _compiled[python]


def _map_elementwise(scalar_fn, *args, pack=1):
    function = compiled(scalar_fn)
    if function.switches or pack != 1:
        raise context.error(
            UnsupportedOperation, "map_elementwise with pack, or of such a function"
        )
    return elementwise.mapped(function.call, *args)


TL.map_elementwise = _map_elementwise


def _source(python) -> tuple[ast.Module, str]:
    lines, first = inspect.getsourcelines(python)
    indent = len(lines[0]) - len(lines[0].lstrip())
    text = "".join(line[indent:] if line[:indent].isspace() or not indent else line
                   for line in lines)  # fmt: skip
    tree = ast.parse(text)
    ast.increment_lineno(tree, first - 1)
    return tree, python.__code__.co_filename


def _compile(python, entry: Compiled) -> None:
    tree, file = _source(python)
    closure = inspect.getclosurevars(python).nonlocals if python.__closure__ else {}
    names = {**python.__globals__, **closure}
    environment = {key: _simulated(x) for key, x in names.items()}
    environment |= _BUILTINS | {"__name__": python.__module__, context.MARK: True}
    definition = tree.body[0]
    definition.decorator_list = []
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    definition.returns = None
    rewriter = _Rewriter(environment, definition)
    definition.body = [y for x in definition.body for y in rewriter.statements(x)]
    ast.fix_missing_locations(tree)
    exec(compile(tree, file, "exec"), environment)
    entry.call = environment[definition.name]
    entry.switches = inspect.isgeneratorfunction(entry.call)
    if entry.switches and any(
        isinstance(x, _Recursion) and x.function is entry for x in environment.values()
    ):
        raise context.error(
            UnsupportedOperation, f"{entry.name} calls itself, and its task may hand over in it"
        )


def _simulated(x):
    """What a global of the kernel's module is in the simulator."""
    if isinstance(x, types.ModuleType):
        return _MODULES.get(x.__name__, x)
    if isinstance(x, tl.constexpr):
        return x.value
    if isinstance(x, triton.runtime.jit.KernelInterface):
        if getattr(x, "__module__", "").startswith("triton.language."):
            return vars(TL).get(x.__name__, x)
        return x
    if isinstance(x, types.FunctionType) and x.__module__.startswith("triton.language"):
        space = TLX if ".tlx" in x.__module__ else TL
        return vars(space).get(x.__name__, x)
    return x


class _Rewriter(ast.NodeTransformer):
    """Rewrites one function's body; see the module's docstring."""

    def __init__(self, environment: dict[str, object], definition: ast.FunctionDef):
        self.environment, self.count = environment, 0
        self.locals = _stored(definition.body)
        self.locals |= {a.arg for a in (*definition.args.args, *definition.args.kwonlyargs)}

    def statements(self, node: ast.stmt) -> list[ast.stmt]:
        new = self.visit(node)
        return new if isinstance(new, list) else [new]

    def resolve(self, node: ast.expr):
        """What a callee is, or None if that is not known before the kernel runs."""
        if isinstance(node, ast.Name):
            if node.id in self.locals:
                return None
            return self.environment.get(node.id, getattr(builtins, node.id, None))
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            if isinstance(owner, Namespace | types.ModuleType):
                try:
                    found = getattr(owner, node.attr)
                except (AttributeError, UnsupportedOperation):
                    return None  # reported when it runs
                if isinstance(found, triton.runtime.jit.KernelInterface):
                    return found
                return _simulated(found)
        return None

    def visit_Call(self, node: ast.Call) -> ast.expr:
        callee = self.resolve(node.func)
        self.generic_visit(node)
        if isinstance(callee, triton.runtime.jit.KernelInterface):
            function = compiled(callee)
            name = f"_sim_{function.name}_{id(function)}"
            self.environment[name] = function.call or _Recursion(function)
            node.func = ast.copy_location(ast.Name(name, ast.Load()), node.func)
            switches = function.switches
        else:
            switches = inspect.isgeneratorfunction(callee) and callee is not language.range
        if not switches:
            return node
        return ast.copy_location(ast.YieldFrom(node), node)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        call = node.value
        named = isinstance(call, ast.Call) and isinstance(node.targets[0], ast.Name)
        if named and getattr(self.resolve(call.func), "__name__", "") in _NAMED:
            text = ast.Constant(node.targets[0].id)
            call.keywords.append(ast.keyword("_name", ast.copy_location(text, call)))
        self.generic_visit(node)
        return node

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        static = isinstance(node.iter, ast.Call) and self.resolve(node.iter.func) in (
            language.static_range,
        )
        names = [] if static else sorted(_assigned(node.body) - _stored([node.target]))
        self.generic_visit(node)
        return [*(self._carry(name, node) for name in names), node]

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        names, polls = sorted(_assigned(node.body)), self._polls(node)
        self.generic_visit(node)
        code = "def f():\n if _sim_turn(True):\n  yield" if polls else "def f():\n _sim_turn(False)"
        node.body.insert(0, _located(ast.parse(code).body[0].body[0], node))
        return [*(self._carry(name, node) for name in names), node]

    def _polls(self, loop: ast.While) -> bool:
        """Whether a loop may read memory, so that another task could end it."""
        calls = [x.func for x in ast.walk(loop) if isinstance(x, ast.Call)]
        if any(isinstance(x, ast.Attribute) and x.attr in _READING for x in calls):
            return True
        return any(
            isinstance(x, triton.runtime.jit.KernelInterface)
            or inspect.isgeneratorfunction(x)
            or x in _ATOMICS
            for x in map(self.resolve, calls)
        )

    def _carry(self, name: str, at: ast.stmt) -> ast.stmt:
        code = f"try:\n    {name} = _sim_carried({name})\nexcept NameError:\n    pass\n"
        return _located(ast.parse(code).body[0], at)

    def visit_With(self, node: ast.With) -> ast.stmt | list[ast.stmt]:
        what = node.items[0].context_expr
        callee = self.resolve(what.func) if isinstance(what, ast.Call) else None
        if callee is ASYNC_TASKS:
            self.count += 1
            specs = f"_sim_specs_{self.count}"
            outer, self.specs = getattr(self, "specs", None), specs
            body = [y for x in node.body for y in self.statements(x)]
            self.specs = outer
            start = _located(ast.parse(f"{specs} = []").body[0], node)
            end = _located(ast.parse(f"def f():\n yield from _sim_run({specs})").body[0].body[0],
                           node)  # fmt: skip
            return [start, *body, end]
        if callee is ASYNC_TASK:
            return self._task(node, what)
        self.generic_visit(node)
        return node

    def _task(self, node: ast.With, call: ast.Call) -> list[ast.stmt]:
        """A closure of the body; what it assigns are its own copies of outer variables."""
        self.count += 1
        name = f"_sim_task_{self.count}"
        own = sorted(_stored(node.body) & self.locals)
        defaults = ", ".join(f"{x}=_sim_locals.get('{x}', _sim_missing)" for x in own)
        code = f"_sim_locals = locals()\ndef {name}({defaults}):\n    if False:\n        yield"
        taken, function = (_located(x, node) for x in ast.parse(code).body)
        for statement in node.body:
            function.body += self.statements(statement)
        spec = ast.parse(f"{self.specs}.append(_sim_spec({name}, {node.lineno}))").body[0]
        _located(spec, node)
        made = spec.value.args[0]
        made.args += call.args
        made.keywords += call.keywords
        return [taken, function, spec]


def _located(node: ast.AST, at: ast.AST) -> ast.AST:
    """node and all in it at another node's place."""
    for x in ast.walk(node):
        if "lineno" in x._attributes:
            ast.copy_location(x, at)
    return node


def _stored(body: list[ast.AST]) -> set[str]:
    """Names that are assigned anywhere in it."""
    return {
        x.id
        for statement in body
        for x in ast.walk(statement)
        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
    }


def _assigned(body: list[ast.AST]) -> set[str]:
    """Those but for constexprs, which are assigned with their annotation."""
    constants = {
        x.target.id
        for statement in body
        for x in ast.walk(statement)
        if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
    }
    return _stored(body) - constants
