"""Changes of Python code, found in its syntax tree. Triton's device functions are Python code as well.

Left out are annotations, decorators, docstrings, imports, f-strings (they make messages), raise statements, and zip's
`strict`, which only raises.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

#: By the name of a node, those that take its place.
_COMPARISONS = {"Lt": "LtE GtE", "LtE": "Lt Gt", "Gt": "GtE LtE", "GtE": "Gt Lt", "Eq": "NotEq", "NotEq": "Eq"}
_COMPARISONS |= {"Is": "IsNot", "IsNot": "Is", "In": "NotIn", "NotIn": "In"}
_ARITHMETIC = {"Add": "Sub", "Sub": "Add", "Mult": "Add", "Div": "Mult", "FloorDiv": "Mult", "Mod": "FloorDiv"}
_ARITHMETIC |= {"Pow": "Mult", "LShift": "RShift", "RShift": "LShift"}
_ARITHMETIC |= {"BitAnd": "BitOr", "BitOr": "BitAnd", "BitXor": "BitAnd"}
_FUNCTIONS = {"min": "max", "minimum": "maximum", "floor": "ceil", "any": "all"}
_FUNCTIONS |= {other: name for name, other in _FUNCTIONS.items()}

_LEFT_OUT = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
_LEFT_OUT_FIELDS = {"annotation", "returns", "decorator_list", "type_comment"}


#: An operator's name, the node that is replaced, and the node that takes its place.
Change = tuple[str, Any, ast.AST]


def python_edits(source: str) -> Iterator[tuple[int, int, str, str]]:
    """Begin, end, operator and replacement of each change."""
    encoded = source.encode()
    begins = list(accumulate((len(line) + 1 for line in encoded.split(b"\n")), initial=0))

    def index(line: int, column: int) -> int:
        """The index of a character; the tree counts bytes."""
        return len(encoded[: begins[line - 1] + column].decode())

    for node in _nodes(ast.parse(source)):
        for operator, old, new in _changes(node):
            text = ast.unparse(new)
            text = f"({text})" if isinstance(old, ast.expr) else text
            start, end = index(old.lineno, old.col_offset), index(old.end_lineno, old.end_col_offset)
            yield start, end, operator, text


def _nodes(node: ast.AST) -> Iterator[Any]:
    """The node and what is below it, without the parts that are left out."""
    yield node
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children if name not in _LEFT_OUT_FIELDS else ():
            if isinstance(child, ast.AST) and not _is_left_out(child):
                yield from _nodes(child)


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.keyword(arg="strict"):
            return True
    return isinstance(node, _LEFT_OUT)


def _changes(node: Any) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=operators):
            for place, operator in enumerate(operators):
                for comparison in _others(_COMPARISONS, operator):
                    yield "comparison", node, _with(node, ops=_replaced(operators, place, comparison))
        case ast.BinOp(op=operator):
            for arithmetic in _others(_ARITHMETIC, operator):
                yield "arithmetic", node, _with(node, op=arithmetic)
        case ast.BoolOp(op=operator):
            yield "boolean", node, _with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield "sign", node, operand
        case ast.Constant(value=value):
            for other in _other_values(value):
                yield "constant", node, ast.Constant(other)
        case ast.Call(func=function, keywords=keywords):
            yield from _renamed(function)
            for place, keyword in enumerate(keywords):
                if keyword.arg not in (None, "strict"):
                    yield "keyword", node, _with(node, keywords=_replaced(keywords, place))
        case ast.AugAssign(op=operator):
            yield "deletion", node, ast.Pass()
            for arithmetic in _others(_ARITHMETIC, operator):
                yield "arithmetic", node, _with(node, op=arithmetic)
        case ast.Expr() | ast.Delete() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "deletion", node, ast.Pass()
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return", node, ast.Return(ast.Constant(None))
        case ast.Break():
            yield "loop", node, ast.Continue()
        case ast.Continue():
            yield "loop", node, ast.Break()
        case ast.If(test=condition) | ast.While(test=condition) | ast.IfExp(test=condition):
            yield from _negated(condition)
        case ast.comprehension(ifs=conditions):
            for condition in conditions:
                yield from _negated(condition)


def _others(table: dict[str, str], operator: ast.AST) -> list[ast.AST]:
    return [getattr(ast, name)() for name in table.get(type(operator).__name__, "").split()]


def _negated(condition: ast.expr) -> Iterator[Change]:
    if not isinstance(condition, ast.Compare | ast.UnaryOp):  # other operators negate these
        yield "condition", condition, ast.UnaryOp(ast.Not(), condition)


def _renamed(function: ast.expr) -> Iterator[Change]:
    match function:
        case ast.Name(id=name) if name in _FUNCTIONS:
            yield "function", function, ast.Name(_FUNCTIONS[name])
        case ast.Attribute(attr=name) if name in _FUNCTIONS:
            yield "function", function, _with(function, attr=_FUNCTIONS[name])


def _other_values(value: object) -> list[int | float | str]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    return [f"{value}X"] if isinstance(value, str) else []


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _replaced(items: list[Any], place: int, *new: Any) -> list[Any]:
    return [*items[:place], *new, *items[place + 1 :]]
