"""cuep.params: parsing `struct Params` and agreeing with a C++ compiler about its layout."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cuep.errors import CompileError
from cuep.params import ParamsLayout

SOURCE = """
using elem_t = unsigned short;
struct Params {
    const elem_t* x;            // [num_tokens, hidden]; int32_t not_a_field;
    bool is_last;
    uint8_t* peers[kNumRanks];  /* one per rank; in rank order */
    int32_t num_tokens;
    int64_t rows_offset;
    float scales[3];
    uint32_t epoch;
    uint64_t clock;
    bool masks[kNumRanks];
};
"""


def test_layout_is_the_compilers(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    layout = ParamsLayout.parse(SOURCE, {"kNumRanks": 5})
    text = "#include <cstdint>\nconstexpr int kNumRanks = 5;\n" + SOURCE + "\n".join(layout.static_asserts())
    source = tmp_path / "check.cpp"
    source.write_text(text)
    command = [compiler, "-std=c++17", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    offset = layout.offsets()["rows_offset"]
    source.write_text(text.replace(f"rows_offset) == {offset}", f"rows_offset) == {offset + 8}"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Params::rows_offset" in done.stderr


def test_offsets_and_types() -> None:
    layout = ParamsLayout.parse(SOURCE, {"kNumRanks": 5})
    assert layout.offsets() == {
        **{"x": 0, "is_last": 8, "peers": 16, "num_tokens": 56, "rows_offset": 64},
        **{"scales": 72, "epoch": 84, "clock": 88, "masks": 96},
    }
    assert layout.dtype.itemsize == 104
    record = layout.new()
    assert record.shape == (1,)
    assert not record.tobytes().strip(b"\0")
    record["x"] = 2**63 + 1
    record["peers"] = np.arange(5)
    record["num_tokens"] = -1
    assert record["x"][0] == 2**63 + 1
    assert record["peers"][0].tolist() == [0, 1, 2, 3, 4]
    assert record.tobytes()[56:60] == b"\xff\xff\xff\xff"


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="num_token"):
        ParamsLayout.parse(SOURCE, {"kNumRanks": 5}).new()["num_token"] = 1


def test_an_array_of_one_stays_an_array() -> None:
    layout = ParamsLayout.parse(SOURCE, {"kNumRanks": 1})
    assert layout.new()["peers"].shape == (1, 1)


@pytest.mark.parametrize(
    "declaration",
    ["double x;", "int x;", "int32_t a, b;", "int32_t a[2][2];", "elem_t x;", "uint8_t** x;", "int32_t a[2 + 1];"],
)
def test_unsupported_field_is_named(declaration: str) -> None:
    with pytest.raises(CompileError) as caught:
        ParamsLayout.parse(f"struct Params {{\n    {declaration}\n}};\n")
    assert f"`{declaration}`" in str(caught.value)


@pytest.mark.parametrize("constants", [{}, {"kNumRanks": 0}, {"kNumRanks": "int"}])
def test_array_length_must_be_a_positive_constant(constants: dict[str, int]) -> None:
    with pytest.raises(CompileError, match="kNumRanks"):
        ParamsLayout.parse("struct Params {\n    uint8_t* peers[kNumRanks];\n};\n", constants)


def test_missing_struct() -> None:
    with pytest.raises(CompileError, match="struct Params"):
        ParamsLayout.parse("int x;")
