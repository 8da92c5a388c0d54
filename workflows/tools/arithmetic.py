"""Evaluates arithmetic that an LLM wrote: numbers, + - * / and brackets; nothing else is ever executed."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Final

from pbkv_ray.errors import InputError

_MAX_LENGTH: Final = 200
_BINARY: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_UNARY: Final[dict[type[ast.unaryop], Callable[[float], float]]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(expression: str) -> float:
    """The value, always finite. Raises InputError for anything that is not plain arithmetic."""
    if len(expression) > _MAX_LENGTH:
        raise InputError(f"the expression has {len(expression)} characters; at most {_MAX_LENGTH} are evaluated")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise InputError(f"{expression!r} divides by zero") from None
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        raise InputError(f"{expression!r} is no arithmetic; use numbers, + - * / and brackets") from None
    if not math.isfinite(value):
        raise InputError(f"{expression!r} has no finite value")
    return value


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case _:
            raise ValueError(type(node).__name__)
