"""The codecs of combine_quant in one process: kernels against the oracle, bit by bit, the oracle against its bounds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cuep
from cuep import jit, layout, reference
from cuep.backend.cpu import CpuBackend
from cuep.kernel import Kernel
from cuep.launching import elem_type
from cuep.world import SingleComm

CODECS = {"logfmt10": 1, "fp8_block128": 2}
HIDDEN = 384  # 3 blocks: one warp has half of its lanes without values
SOURCE = Path(__file__).parent / "kernels/simt_combine_codec.cu"
LARGEST, SMALLEST = 2.0**127, 2.0**-149


@pytest.fixture(scope="module", autouse=True)
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("kernels")
    shutil.copytree(jit.KERNELS_DIR / "include", folder / "include")
    shutil.copy(SOURCE, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "KERNELS_DIR", folder)
        patch.setenv("CUEP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def rows_of_all_kinds(dtype: str) -> np.ndarray:
    """Random bits, and rows whose values are close, far apart, tiny, huge, zero, alike, infinite or NaN."""
    rng = np.random.default_rng(5)
    shape, signs = (20, HIDDEN), rng.choice([-1, 1], (20, HIDDEN))
    kinds = [
        rng.standard_normal(shape),
        signs * np.exp2(rng.uniform(-126, 127, shape)),
        signs * np.exp2(rng.uniform(-149, -100, shape)),
        signs * np.exp2(rng.uniform(-30, 0, shape)),
        signs * rng.integers(0, 200, shape) * SMALLEST,
        signs * (1 + rng.random(shape) * 1e-5),
        signs * 3.7,
        signs * 0.0,
        signs * LARGEST,
        rng.standard_normal(shape) * (rng.random(shape) < 0.01),
    ]
    rows = np.concatenate(kinds).astype(np.float32)
    for number, value in enumerate((np.inf, -np.inf, np.nan)):
        rows[number, 130 * number] = value
        rows[3 + number, :128] = value
    with np.errstate(over="ignore"):
        narrow = rows.astype(layout.dtype_of(dtype))
    bits = rng.integers(0, 256, (200, HIDDEN * narrow.dtype.itemsize), np.uint8).view(narrow.dtype)
    finite = np.where(np.isfinite(bits.astype(np.float32)), bits, np.ones_like(bits))
    return np.concatenate([narrow, bits, finite])


def sent_bytes(rows: np.ndarray, combine_quant: str, num_bytes: int, per: int) -> np.ndarray:
    """The format of combine_codec.cuh, [rows, num_bytes]; what pads a row is 0."""
    values, end = rows.astype(np.float32), HIDDEN
    sent = np.zeros((len(rows), num_bytes), np.uint8)
    if combine_quant == "fp8_block128":
        codes, scales = reference.quantise(values, "fp32")
        sent[:, :end], headers = codes.view(np.uint8), scales.view(np.uint8)
    else:
        encoded = reference.encode_logfmt10(values)
        sent[:, :end] = encoded.codes & 0xFF
        flags = np.stack([encoded.codes >> 8, encoded.signs], 2).reshape(len(rows), -1, per // 2, 2, 2).swapaxes(2, 3)
        end += HIDDEN // 4
        sent[:, HIDDEN:end] = np.packbits(flags.reshape(len(rows), -1).astype(np.uint8), axis=1, bitorder="little")
        headers = np.stack([encoded.base, encoded.step], 2).view(np.uint8).reshape(len(rows), -1)
    sent[:, end : end + headers.shape[1]] = headers
    return sent


@pytest.mark.parametrize("combine_quant", CODECS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_equal_the_oracle(combine_quant: str, dtype: str) -> None:
    rows = rows_of_all_kinds(dtype)
    cfg = cuep.GroupConfig("ll", 2, HIDDEN, 1, 1, dtype=dtype, combine_quant=combine_quant)
    num_bytes, per = cfg.combine_sent_row_bytes, 16 // rows.dtype.itemsize
    backend = CpuBackend(SingleComm())
    constants: dict[str, Any] = {"kCodec": CODECS[combine_quant], "kNumValues": HIDDEN, "elem_t": elem_type(dtype)}
    kernel = Kernel(backend, "simt_combine_codec", constants)
    sent = np.zeros((len(rows), num_bytes), np.uint8)
    values = np.full(rows.shape, np.nan, np.float32)
    memory = np.zeros(rows.nbytes + 16, np.uint8)
    aligned = memory[-memory.ctypes.data % 16 :][: rows.nbytes].view(rows.dtype).reshape(rows.shape)
    aligned[...] = rows
    record = kernel.layout.new()
    for name, value in {"rows": aligned, "sent": sent, "values": values}.items():
        record[name] = value.ctypes.data
    record["num_rows"] = len(rows)
    kernel.launch(2, record, backend.stream(None))
    backend.synchronize()

    reference.assert_same(values, reference.carried(rows, combine_quant), "values")
    want = sent_bytes(rows, combine_quant, num_bytes, per)
    is_row = np.isfinite(rows.astype(np.float32)).all(1)  # elsewhere a NaN may have any bits
    reference.assert_same(sent[is_row], want[is_row], "sent")


def check_bound(x: np.ndarray, combine_quant: str) -> None:
    carried, bound = reference.carried(x, combine_quant), reference.carried_bound(x, combine_quant)
    wrong = ~(np.abs(carried.astype(np.float64) - x) <= bound)
    assert not wrong.any(), (x[wrong][0], carried[wrong][0], bound[wrong][0])
    assert (np.signbit(carried) == np.signbit(x)).all() and (carried[x == 0] == 0).all()


@pytest.mark.parametrize("combine_quant", CODECS)
def test_bound(combine_quant: str) -> None:
    rows = rows_of_all_kinds("float32")
    rows = rows[(np.abs(rows) < np.float32(2.0**128 - 2.0**110)).all(1)]
    assert len(rows) > 300
    check_bound(rows, combine_quant)


@pytest.mark.parametrize("combine_quant", CODECS)
@settings(max_examples=200, deadline=None)
@given(
    x=hnp.arrays(np.float32, 128, elements=st.floats(-LARGEST, LARGEST, width=32)),
    spread=st.integers(0, 250),
    seed=st.integers(0, 2**32 - 1),
)
def test_bound_of_anything(combine_quant: str, x: np.ndarray, spread: int, seed: int) -> None:
    check_bound(x[None], combine_quant)
    rng = np.random.default_rng(seed)
    first = rng.uniform(-149, 127 - spread) if spread < 250 else -149
    check_bound(np.exp2(rng.uniform(first, first + spread, (1, 128))).astype(np.float32), combine_quant)


@pytest.mark.parametrize(("combine_quant", "most"), [("logfmt10", 0.0037), ("fp8_block128", 0.027)])
def test_error_of_ordinary_rows(combine_quant: str, most: float) -> None:
    """What GroupConfig says of N(0, 1) rows; bfloat16 has 0.0017."""
    x = np.random.default_rng(3).standard_normal((20, 7168)).astype(np.float32)
    error = np.linalg.norm(reference.carried(x, combine_quant).astype(np.float64) - x) / np.linalg.norm(x)
    assert 0.9 * most < error < most


def test_largest_of_a_block_is_kept() -> None:
    """logfmt10: the top level is the largest value, within what a logarithm is off; powers of two are exact."""
    x = np.random.default_rng(4).standard_normal((50, 128)).astype(np.float32)
    x[::2, 7] = 8.0
    largest = np.abs(x).argmax(1)[:, None]
    kept = np.take_along_axis(reference.carried(x, "logfmt10"), largest, 1)
    np.testing.assert_allclose(kept, np.take_along_axis(x, largest, 1), rtol=6e-4)
    assert (kept[::2] == 8).all()


def test_infinities_and_nan() -> None:
    """Never silently finite: the whole block is NaN, its neighbours are not; the largest finite values stay finite."""
    for combine_quant in CODECS:
        for value in (np.inf, -np.inf, np.nan):
            x = np.ones((1, HIDDEN), np.float32)
            x[0, 130:135] = [value, 0, -1, 1e-30, 1e30]
            got = np.isnan(reference.carried(x, combine_quant))[0]
            assert got[128:256].all() and not got[:128].any() and not got[256:].any()
        for dtype in (ml_dtypes.bfloat16, np.float16):
            x = np.full((1, 128), float(ml_dtypes.finfo(dtype).max), np.float32)
            assert np.isfinite(reference.carried(x, combine_quant).astype(dtype)).all()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"combine_quant": "fp4"}, "combine_quant='fp4' is not allowed; allowed: .*'logfmt10', 'fp8_block128'"),
        ({"combine_quant": "logfmt10", "mode": "ht"}, "combine_quant='logfmt10' is not allowed; allowed: None"),
        ({"combine_quant": "logfmt10", "hidden": 192}, "hidden=192 is not allowed; allowed: a multiple of 128"),
        ({"combine_quant": ["logfmt10"]}, "combine_quant=.* is not allowed"),
    ],
)
def test_settings_that_do_not_fit(change: dict[str, Any], match: str) -> None:
    config: dict[str, Any] = {"mode": "ll", "num_experts": 8, "hidden": 256, "num_topk": 2, "max_tokens_per_rank": 4}
    with pytest.raises(cuep.ArgumentError, match=match):
        cuep.GroupConfig(**(config | change))


def test_sizes() -> None:
    """Bytes of a row of 7168, and of the memory for 128 tokens of 8 ranks."""
    config: dict[str, Any] = {
        "mode": "ll", "num_experts": 256, "hidden": 7168, "num_topk": 8, "max_tokens_per_rank": 128,
    }  # fmt: skip
    plain = cuep.GroupConfig(**config)
    for combine_quant, num_bytes in (("logfmt10", 9408), ("fp8_block128", 7392)):
        cfg = cuep.GroupConfig(**config, combine_quant=combine_quant)
        assert cfg.combine_row_bytes == 14336 and cfg.combine_sent_row_bytes == num_bytes
        saved = cuep.footprint(plain, 8)["symmetric"] - cuep.footprint(cfg, 8)["symmetric"]
        assert saved == 2 * 128 * 8 * (14336 - num_bytes)


def test_rows_that_are_encoded_do_not_travel_as_lines() -> None:
    config: dict[str, Any] = {
        "mode": "ll", "num_experts": 8, "hidden": 128, "num_topk": 2, "max_tokens_per_rank": 4,
    }  # fmt: skip
    for reduce, name in (("exact", "direct"), ("per_rank", "partial")):
        cfg = cuep.GroupConfig(**config, reduce=reduce, combine_quant="logfmt10")
        assert layout.variant(cfg, "combine") == name and layout.variant(cfg, "dispatch") == "line"
    assert layout.variant(cuep.GroupConfig(**config), "combine") == "line"
