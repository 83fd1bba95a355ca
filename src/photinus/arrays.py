"""What the engine needs to know of an array: where it lies, how long it is, and its element type."""

from __future__ import annotations

import math
from typing import Any

from . import _native

DTYPES: dict[str, int] = _native.DTYPES
"""Element types by name, as the engine numbers them."""

_BY_TYPESTR = {
    "f4": "float32",
    "f8": "float64",
    "f2": "float16",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "b1": "bool",
}


def facts(array: Any, *, writable: bool) -> tuple[int, int, int, tuple[int, ...]]:
    """Address, number of elements, element type and shape of a C-contiguous array."""
    interface = getattr(array, "__array_interface__", None)
    if interface is None:
        raise TypeError(f"needs a numpy array (or another object with __array_interface__), not {type(array).__name__}")
    name = _BY_TYPESTR.get(interface["typestr"][1:])
    if str(getattr(array, "dtype", "")) == "bfloat16":  # ml_dtypes' arrays call themselves void
        name = "bfloat16"
    if name is None or interface["typestr"][0] == ">":
        given = getattr(array, "dtype", interface["typestr"])
        raise TypeError(f"element type {given} is not one of {', '.join(DTYPES)}")
    if interface.get("strides") is not None:
        raise ValueError("needs a C-contiguous array; make one with numpy.ascontiguousarray")
    place = interface.get("data")  # the protocol also has arrays that tell it by a buffer
    if not isinstance(place, tuple):
        raise TypeError(f"a {type(array).__name__} does not tell its address; make an array with numpy.asarray")
    address, read_only = place
    if writable and read_only:
        raise ValueError("the array is read-only, but the result goes into it")
    shape = tuple(interface["shape"])  # some objects have a list
    return address, math.prod(shape), DTYPES[name], shape
