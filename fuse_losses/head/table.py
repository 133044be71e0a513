"""A table from operators to functions, filled by a decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class OperatorTable(dict[Any, F]):
    """`@table.rule(op, ...)` enters the function that follows for each operator."""

    def rule(self, *targets: Any) -> Callable[[F], F]:
        def register(function: F) -> F:
            for target in targets:
                self[target] = function
            return function

        return register
