"""Checks of what a public function is given: numbers, tensors, and names that stand for functions."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlkit.support.checks import hint, number, shown


def as_tensor(name: str, values, expected: str = "a tensor or a list of numbers", **options) -> Tensor:
    """``torch.as_tensor`` whose error names the argument."""
    try:
        return torch.as_tensor(values, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: got {shown(values)}, expected {expected}") from error


def named_function(name: str, value, table: dict[str, Callable]) -> Callable:
    """The function that ``value`` names in ``table``; a function is given back as it is."""
    if callable(value):
        return value
    if isinstance(value, str) and value in table:
        return table[value]
    raise ValueError(
        f"{name}: got {shown(value)}, expected one of {', '.join(table)} or a function{hint(value, table)}"
    )


def check_number(name: str, value, test: Callable[[float], bool], expected: str) -> None:
    """ValueError unless the value is a finite number (not a bool, not text) that passes the test."""
    if not (math.isfinite(number(value)) and test(number(value))):
        raise ValueError(f"{name}: got {shown(value)}, expected {expected}")


def is_one_number(value) -> bool:
    """Whether it is a number, or a tensor or array of one; NaN is one."""
    count = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 1)
    return count == 1 and hasattr(value, "__float__")


def check_count(name: str, value, expected: str = "an integer >= 1") -> None:
    """ValueError unless the value is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: got {shown(value)}, expected {expected}")


def check_shape(name: str, tensor, shape: tuple, meaning: str) -> None:
    """ValueError unless it is a tensor of this shape. ``meaning`` ends the message."""
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != tuple(shape):
        got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else shown(tensor)
        raise ValueError(f"{name}: got {got}, expected {tuple(shape)}, {meaning}")


def check_matrix(name: str, tensor) -> None:
    """ValueError unless it is a tensor (batch, sequence)."""
    if not isinstance(tensor, Tensor) or tensor.ndim != 2:
        got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else shown(tensor)
        raise ValueError(f"{name}: got {got}, expected a tensor (batch, sequence)")


def check_finite(what: str, values: Tensor) -> None:
    """ValueError naming the first row of a (N,) tensor that is NaN or infinite."""
    if not bool(torch.isfinite(values).all()):
        row = int((~torch.isfinite(values)).nonzero()[0, 0])
        raise ValueError(f"{what} in row {row} is {values[row].item()}, expected finite numbers")
