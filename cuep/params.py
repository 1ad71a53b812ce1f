"""`struct Params` of a kernel file: its layout as a NumPy record, filled by name, and asserts that both sides agree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cuep.errors import CompileError

Constant = bool | int | str  # str: a C++ type

_SCALARS = {"bool": "?", "int32_t": "i4", "uint32_t": "u4", "int64_t": "i8", "uint64_t": "u8", "float": "f4"}
_STRUCT = re.compile(r"^struct Params \{\n(.*?)^\};", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FIELD = re.compile(
    r"(?:const\s+)?(?P<type>[\w:]+)\s*(?P<stars>\*?)\s*(?P<name>\w+)\s*(?:\[\s*(?P<length>\w+)\s*\])?", re.ASCII
)

# NVRTC 12 has no __builtin_offsetof, and its offsetof is no constant; __INTADDR__ is what its parser's own is made of.
_OFFSETOF = """\
#ifdef __CUDACC_RTC__
#define CUEP_OFFSETOF(field) __INTADDR__(&((Params*)nullptr)->field)
#else
#define CUEP_OFFSETOF(field) __builtin_offsetof(Params, field)
#endif
"""


@dataclass(frozen=True)
class ParamsLayout:
    """The NumPy layout of one `struct Params`. Pointer fields are uint64 addresses."""

    dtype: np.dtype[np.void]

    @classmethod
    def parse(cls, source: str, constants: Mapping[str, Constant] | None = None) -> ParamsLayout:
        """Read `struct Params` out of a kernel file; `constants` gives array lengths that are names."""
        struct = _STRUCT.search(source)
        if struct is None:
            raise CompileError("kernel file has no `struct Params {` ... `};` that starts and ends its own lines")
        fields: list[tuple[str, str, tuple[int, ...]]] = []
        for declaration in _COMMENT.sub("", struct[1]).split(";"):
            text = " ".join(declaration.split())
            if text:
                fields.append(_field(text, constants or {}))
        return cls(np.dtype(fields, align=True))

    def offsets(self) -> dict[str, int]:
        """Byte offset of each field."""
        fields = self.dtype.fields
        return {name: int(fields[name][1]) for name in self.dtype.names or ()} if fields else {}

    def static_asserts(self) -> list[str]:
        """C++ that fails to compile, naming the field, if the compiler lays the struct out differently."""
        checks = [
            f'static_assert(CUEP_OFFSETOF({name}) == {offset}, "Params::{name}");'
            for name, offset in self.offsets().items()
        ]
        return [
            *_OFFSETOF.splitlines(),
            *checks,
            f'static_assert(sizeof(Params) == {self.dtype.itemsize}, "sizeof(Params)");',
        ]

    def new(self) -> npt.NDArray[np.void]:
        """A zeroed record of shape (1,), to be filled by name: `record["num_tokens"] = 5`."""
        return np.zeros(1, self.dtype)


class FastRecord:
    """A record whose fields are set by name in a tenth of NumPy's time, for calls on the critical path of a step.

    record["x"] = address; arrays take a sequence. Attributes: address of its bytes, names of its fields.
    """

    _VIEWS: ClassVar = {"?": "?", "i4": "i", "u4": "I", "i8": "q", "u8": "Q", "f4": "f"}

    def __init__(self, array: npt.NDArray[np.void]) -> None:
        self._array = array
        self.address = int(array.ctypes.data)
        self.names = frozenset(array.dtype.names or ())
        whole = array.view(np.uint8).data
        views: dict[str, Any] = {}
        self._fields: dict[str, tuple[Any, int, int]] = {}
        for name, entry in (array.dtype.fields or {}).items():
            kind = entry[0].base
            code: Any = self._VIEWS["?" if kind == np.bool_ else kind.str[1:]]
            if code not in views:
                views[code] = whole.cast(code)
            self._fields[name] = (
                views[code],
                int(entry[1]) // kind.itemsize,
                entry[0].shape[0] if entry[0].shape else 0,
            )

    def __getitem__(self, name: str) -> Any:
        view, index, count = self._fields[name]
        return list(view[index : index + count]) if count else view[index]

    def __setitem__(self, name: str, value: Any) -> None:
        view, index, count = self._fields[name]
        if not count:
            view[index] = value
            return
        for i in range(count):
            view[index + i] = value[i]

    def tobytes(self) -> bytes:
        return self._array.tobytes()


def _field(text: str, constants: Mapping[str, Constant]) -> tuple[str, str, tuple[int, ...]]:
    field = _FIELD.fullmatch(text)
    if field is None or not (field["stars"] or field["type"] in _SCALARS):
        raise CompileError(
            f"unsupported Params field `{text};`: use pointers, {', '.join(_SCALARS)} or one-dimensional arrays of them"
        )
    code = "u8" if field["stars"] else _SCALARS[field["type"]]
    length = field["length"]
    if length is None:
        return field["name"], code, ()
    count = int(length) if length.isdigit() else constants.get(length)
    if not isinstance(count, int) or count < 1:
        raise CompileError(f"Params field `{text};`: {length} is no positive number among the constants")
    return field["name"], code, (count,)
