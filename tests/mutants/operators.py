"""The kinds of change: every place of a file where one of them fits.

Left alone: docstrings, texts, annotations, assertions, log lines, what an error says, decorators,
``__repr__``, room that is reserved, lengths of one attribute or another, and keywords that change no result.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.mutants.edits import Text
from tests.mutants.mutant import Mutant, numbered

Edit = tuple[int, int, str, str]
"""(start, end, new text, kind of change)."""

COMPARISONS = {
    ast.Lt: ("<", ("<=", ">=")), ast.LtE: ("<=", ("<", ">")), ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")), ast.Eq: ("==", ("!=",)), ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)), ast.IsNot: ("is not", ("is",)), ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
}  # fmt: skip


def _both_ways(*pairs: str) -> dict[str, str]:
    return {a: b for pair in pairs for a, b in (pair.split(), pair.split()[::-1])}


NAMES = _both_ways(
    "min max", "minimum maximum", "argmin argmax", "any all", "floor ceil", "zeros ones", "cumsum cumprod",
    "logical_and logical_or",
)  # fmt: skip
ATTRIBUTES = _both_ways(
    "memory time", "source target", "rows cols", "weight_m weight_t", "memory_grid time_grid",
    "memory_error time_error", "height width", "reads writes", "latency_s per_byte_s",
    "compute_s communication_s", "exposed_s hidden_s",
)  # fmt: skip
UNORDERED = {
    "min", "max", "minimum", "maximum", "isinstance", "issubclass", "gcd", "lcm", "isclose", "getattr",
}  # fmt: skip
QUIET_KEYWORDS = {"strict", "dtype", "repr", "cache", "nogil", "frozen", "slots", "eq", "kw_only", "copy"}
LOGGERS = {"log", "logger", "logging", "warnings"}


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    text = Text(file, source)
    edits = _Walk(text).edits(ast.parse(source))
    found = (text.changed(*edit[:3], function, edit[3]) for edit, function in edits)
    return numbered([mutant for mutant in found if mutant is not None])


class _Walk:
    def __init__(self, text: Text) -> None:
        self.text = text

    def edits(self, node: ast.AST, path: tuple[str, ...] = ()) -> Iterator[tuple[Edit, str]]:
        """The changes of a node and of all in it, each with the function that encloses it."""
        named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inner = (*path, node.name) if isinstance(node, named) else path
        if _left_alone(node):
            return
        for edit in self._here(node):
            yield edit, ".".join(inner)
        for child in _children(node):
            yield from self.edits(child, inner)

    def _here(self, node: ast.AST) -> Iterator[Edit]:
        changes = getattr(self, f"_{type(node).__name__.lower()}", None)
        if changes is not None:
            yield from changes(node)

    def _between(self, left: ast.AST, right: ast.AST, old: str, new: str, kind: str) -> Iterator[Edit]:
        found = self.text.between(left, right, old, new)
        if found:
            yield *found, kind

    def _whole(self, node: ast.AST, new: str, kind: str) -> Edit:
        return *self.text.span(node), new, kind

    # -- expressions ------------------------------------------------------------------------------

    def _compare(self, node: ast.Compare) -> Iterator[Edit]:
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            old, others = COMPARISONS[type(op)]
            for new in others:
                yield from self._between(left, right, old, new, "compare")
            left = right

    def _binop(self, node: ast.BinOp) -> Iterator[Edit]:
        if type(node.op) in ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
            old, new = ARITHMETIC[type(node.op)]
            yield from self._between(node.left, node.right, old, new, "arithmetic")

    def _boolop(self, node: ast.BoolOp) -> Iterator[Edit]:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from self._between(left, right, old, new, "and-or")

    def _unaryop(self, node: ast.UnaryOp) -> Iterator[Edit]:
        if isinstance(node.op, (ast.Not, ast.USub, ast.Invert)) and not isinstance(
            node.operand, ast.Constant
        ):
            yield self._whole(node, f"({self.text.of(node.operand)})", "drop-sign")

    def _constant(self, node: ast.Constant) -> Iterator[Edit]:
        value = node.value
        if isinstance(value, bool):
            others = [str(not value)]
        elif isinstance(value, int):
            others = [str(value + 1), str(value - 1)] if value > 0 else [str(value + 1)]
        elif isinstance(value, float):
            others = [f"({self.text.of(node)} * {by})" for by in (1.02, 0.5)] if value else ["1.0"]
        else:
            others = []
        yield from (self._whole(node, new, "constant") for new in others)
        if value in ("left", "right"):
            yield self._whole(node, repr("left" if value == "right" else "right"), "side")

    def _if(self, node: ast.If | ast.IfExp) -> Iterator[Edit]:
        if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            yield self._whole(node.test, f"(not ({self.text.of(node.test)}))", "condition")

    _ifexp = _if

    def _comprehension(self, node: ast.comprehension) -> Iterator[Edit]:
        for test in node.ifs:
            yield self._whole(test, "True", "drop-filter")

    def _call(self, node: ast.Call) -> Iterator[Edit]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in NAMES:
            _, end = self.text.span(node.func)
            yield end - len(name), end, NAMES[name], "other-function"
        for keyword in node.keywords:
            if keyword.arg == "axis" and isinstance(keyword.value, ast.Constant):
                yield self._whole(keyword.value, "1" if keyword.value.value == 0 else "0", "axis")
        if len(node.args) >= 2 and name not in UNORDERED:
            first, second = node.args[:2]
            plain = not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred)
            if plain and not _is_text(first) and not _is_text(second):
                (a, b), (c, d) = self.text.span(first), self.text.span(second)
                new = self.text.of(second) + self.text.source[b:c] + self.text.of(first)
                yield a, d, new, "swap-arguments"

    def _attribute(self, node: ast.Attribute) -> Iterator[Edit]:
        if node.attr in ATTRIBUTES and isinstance(node.ctx, ast.Load):
            _, end = self.text.span(node)
            yield end - len(node.attr), end, ATTRIBUTES[node.attr], "other-attribute"

    def _slice(self, node: ast.Slice) -> Iterator[Edit]:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, (ast.Constant, ast.UnaryOp)):
                yield self._whole(bound, f"({self.text.of(bound)}) + 1", "slice")

    # -- statements -------------------------------------------------------------------------------

    def _expr(self, node: ast.Expr) -> Iterator[Edit]:
        if isinstance(node.value, ast.Call):
            yield self._whole(node, "pass", "drop-statement")

    def _augassign(self, node: ast.AugAssign) -> Iterator[Edit]:
        yield self._whole(node, "pass", "drop-statement")
        if type(node.op) in ARITHMETIC:
            old, new = ARITHMETIC[type(node.op)]
            yield from self._between(node.target, node.value, f"{old}=", f"{new}=", "arithmetic")

    def _assign(self, node: ast.Assign) -> Iterator[Edit]:
        if all(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets):
            yield self._whole(node, "pass", "drop-statement")

    def _raise(self, node: ast.stmt) -> Iterator[Edit]:
        yield self._whole(node, "pass", "drop-statement")

    def _continue(self, node: ast.Continue) -> Iterator[Edit]:
        yield self._whole(node, "break", "loop")

    def _break(self, node: ast.Break) -> Iterator[Edit]:
        yield self._whole(node, "continue", "loop")

    def _functiondef(self, node: ast.FunctionDef) -> Iterator[Edit]:
        gives = node.returns.id if isinstance(node.returns, ast.Name) else ""
        forms = {"float": "({}) * 1.02", "int": "({}) + 1", "bool": "not ({})"}
        if gives not in forms:
            return
        for inner in _returns(node):
            if inner.value is not None and not isinstance(inner.value, ast.Constant):
                yield self._whole(inner.value, forms[gives].format(self.text.of(inner.value)), "return")


def _returns(function: ast.FunctionDef) -> Iterator[ast.Return]:
    """The returns of a function itself, not of those inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Return):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _left_alone(node: ast.AST) -> bool:
    """Whether nothing in a node is changed."""
    if isinstance(node, (ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.FunctionDef):
        return node.name == "__repr__"
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    if isinstance(node, ast.Expr):
        value = node.value
        if isinstance(value, ast.Constant):
            return True
        return isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[0] in LOGGERS
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "np.empty"  # room that grows, or is written before it is read
    if isinstance(node, ast.keyword):
        return node.arg in QUIET_KEYWORDS or (node.arg == "axis" and isinstance(node.value, ast.Constant))
    return False


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that may be changed."""
    skipped = {"annotation", "returns", "decorator_list", "type_params"}
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Attribute) and node.attr == "shape"):
        return
    if isinstance(node, ast.Module):
        yield from (s for s in node.body if not _is_alias(s))
        return
    for name, value in ast.iter_fields(node):
        if name in skipped or (name == "args" and _is_length(node)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _is_length(node: ast.AST) -> bool:
    """Whether a node is the length of an attribute, which is that of the other one."""
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "len"
        and isinstance(node.args[0], ast.Attribute)
    )


def _is_alias(statement: ast.stmt) -> bool:
    """Whether a statement at module level names a type, as in ``Floats = NDArray[np.float64]``."""
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, (ast.Subscript, ast.BinOp))
        and (isinstance(statement.value, ast.Subscript) or isinstance(statement.value.op, ast.BitOr))
    )
