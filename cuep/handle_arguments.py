"""What a handle's calls are given, checked: each function raises what the call says, before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cuep import arrays
from cuep.backend import Rows
from cuep.errors import ArgumentError, ArgumentTypeError
from cuep.launching import CombineCall, check_takes

if TYPE_CHECKING:
    from cuep.group import Group
    from cuep.handle import Handle

TOPK_DTYPES = ("int32", "int64")
_MAX_BIASES = 2


def check_dispatch(handle: Handle, x: arrays.View, scales: arrays.View | None, out: arrays.View | None) -> None:
    group, cfg = handle.group, handle.group.cfg
    arrays.check_matrix(x, "x", handle.num_rows, cfg.columns, arrays.allowed_dtypes(cfg.dtype))
    arrays.check_rows(x, "x", cfg.row_bytes)
    if cfg.num_scales and (cfg.scale_layout == "column_major" or handle.is_in_place or cfg.mode == "ht"):
        what = f"mode={cfg.mode!r}, quant={cfg.quant!r} with rows and scales in one place or by columns"
        arrays.check_takes_strides(x, "x", group.world.backend, what)
    group.mode.prepare_dispatch(handle, out)
    _check_scales(handle, scales, out)
    if out is not None:
        arrays.check_apart(x, "x", arrays.rows_of(out), "out, which dispatch writes")
    own = "this handle's own Received.tokens, which its dispatch writes"
    arrays.check_apart(x, "x", handle.state.recv_rows, own)
    if out is not None:
        for rows in _rows_of_peers(handle):
            arrays.check_apart(x, "x", rows, own)
            is_same = rows[0] == out.address and rows[2] == arrays.rows_of(out)[2]
            if not is_same:
                arrays.check_disjoint(out, "out", arrays.extent(rows), own)


def _check_scales(handle: Handle, scales: arrays.View | None, out: arrays.View | None) -> None:
    cfg = handle.group.cfg
    columns = cfg.scale_columns if cfg.quant == "forward" else 0
    if (scales is not None) != (columns > 0):
        allowed = f"[{handle.num_rows}, {columns}] {cfg.scale_dtype}" if columns else "None"
        given = "None" if scales is None else f"an array {list(scales.shape)}"
        raise ArgumentError(f"scales: got {given}, allowed with quant={cfg.quant!r}: {allowed}")
    if scales is None:
        return
    dtypes = arrays.allowed_dtypes(cfg.scale_dtype, cfg.scale_format)
    arrays.check_matrix(scales, "scales", handle.num_rows, columns, dtypes)
    if any(place % cfg.scale_bytes for place in (scales.address, *scales.strides)):
        raise ArgumentError(
            f"scales must be aligned to their elements, got address {scales.address:#x}, strides {scales.strides}"
        )
    for name in ("tokens", "scales", "out_scales"):
        if name in handle.arrays:
            own = arrays.view(handle.arrays[name], name, handle.group.world.backend)
            what = f"this handle's own Received.{name.removeprefix('out_')}, which its dispatch writes"
            arrays.check_disjoint(scales, "scales", arrays.span(own), what)
    for rows in _rows_of_peers(handle):
        own_rows = "this handle's own receive buffer, which its dispatch writes"
        arrays.check_disjoint(scales, "scales", arrays.extent(rows), own_rows)
    if out is not None:
        arrays.check_disjoint(scales, "scales", arrays.span(out), "out, which dispatch writes")


def combine_call(
    handle: Handle, expert_out: arrays.View, topk_weights: Any, bias: Any, row_weight_grads: Any, out: Any
) -> CombineCall:
    """The arguments of combine, checked; expert_out has been."""
    group, cfg = handle.group, handle.group.cfg
    weights = None
    if not isinstance(topk_weights, str) and topk_weights is not None:
        if cfg.reduce != "exact":
            raise ArgumentError(
                f"topk_weights: an array is allowed with reduce='exact' only, not with reduce={cfg.reduce!r},"
                f" layout={cfg.layout!r}; allowed: 'handle', None"
            )
        weights = group.view(topk_weights, "topk_weights")
        arrays.check_matrix(weights, "topk_weights", handle.num_rows, cfg.num_topk, ("float32",))
        check_contiguous(weights, "topk_weights")
    elif topk_weights not in ("handle", None):
        raise ArgumentError(f"topk_weights={topk_weights!r} is not allowed; allowed: 'handle', None or an array")
    given = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    if len(given) > _MAX_BIASES:
        raise ArgumentError(f"bias: got a tuple of {len(given)} arrays, allowed: at most {_MAX_BIASES}")
    names = [f"bias[{i}]" if isinstance(bias, tuple) else "bias" for i in range(len(given))]
    biases = tuple(_check_output_like(handle, array, name) for array, name in zip(given, names, strict=True))
    grads = None
    if row_weight_grads is not None:
        grads = group.view(row_weight_grads, "row_weight_grads")
        shape = group.mode.row_weight_grads_shape(handle)
        arrays.check_shape(grads, "row_weight_grads", shape, ("float32",))
        check_contiguous(grads, "row_weight_grads")
    check_takes(handle.state.combine, "combine", bias=bool(given), row_weight_grads=grads is not None)
    y = handle.y_view if out is None else _check_output_like(handle, out, "out", is_written=True)
    written, what = arrays.rows_of(y), "out" if out is not None else "this handle's own y"
    for name, read in (("expert_out", expert_out), ("topk_weights", weights), ("row_weight_grads", grads)):
        if read is not None:
            arrays.check_apart(read, name, written, f"{what}, which combine writes")
    if handle.is_in_place:
        theirs = "this handle's own Received.tokens, which peers write from its combine on"
        for name, view in (("out", y), *zip(names, biases, strict=True)):
            for rows in _rows_of_peers(handle):
                arrays.check_disjoint(view, name, arrays.extent(rows), theirs)
    if group.mode.combine_buffers is not None:
        pulled = arrays.extent(group.mode.combine_buffers.memory)
        for name, view in (("out", y), ("row_weight_grads", grads), *zip(names, biases, strict=True)):
            if view is not None:
                arrays.check_disjoint(view, name, pulled, "a combine buffer, which is for expert_out")
    for name, bias_view in zip(names, biases, strict=True):
        own = arrays.rows_of(bias_view)
        if (own[0], own[2]) != (written[0], written[2]):  # row by row, y may be written over its bias
            arrays.check_apart(bias_view, name, written, f"{what}, which combine writes")
    return CombineCall(expert_out, y, weights, topk_weights is not None, biases, grads)


def _check_output_like(handle: Handle, array: Any, name: str, *, is_written: bool = False) -> arrays.View:
    """bias and out have the shape of y."""
    cfg = handle.group.cfg
    view = handle.group.view(array, name, is_written=is_written)
    arrays.check_matrix(view, name, handle.num_rows, cfg.hidden, (str(cfg.combine_dtype),))
    arrays.check_rows(view, name, cfg.combine_row_bytes)
    return view


def _rows_of_peers(handle: Handle) -> list[Rows]:
    """Memory of this handle that peers write, also with out=."""
    if handle.group.cfg.mode == "ht":
        rows: Rows = handle.state.recv_rows
        return [rows]
    if not handle.is_in_place:
        return []
    begin, num_rows, stride, _ = arrays.rows_of(arrays.view(handle.arrays["tokens"], "", handle.group.world.backend))
    return [(begin, num_rows, stride, stride)]


def check_contiguous(view: arrays.View, name: str) -> None:
    if not view.is_contiguous:
        raise ArgumentError(f"{name} must be C-contiguous, got strides {view.strides} bytes")
    if view.address % np.dtype(view.dtype).itemsize:
        raise ArgumentError(f"{name} must be aligned to its elements, got address {view.address:#x}")


def token_count(num_tokens: Any, num_rows: int, group: Group) -> int | arrays.View:
    """num_tokens as a number of the host's, or as a view of one element on the device."""
    if num_tokens is None:
        return num_rows
    if isinstance(num_tokens, (int, np.integer)) and not isinstance(num_tokens, bool):
        if not 0 <= num_tokens <= num_rows:
            raise ArgumentError(
                f"num_tokens={num_tokens} is not allowed; allowed: 0 to {num_rows}, the rows of topk_idx"
            )
        return int(num_tokens)
    view = group.view(num_tokens, "num_tokens")
    if view.dtype not in TOPK_DTYPES:
        raise ArgumentTypeError(f"num_tokens has dtype {view.dtype}, allowed: {', '.join(TOPK_DTYPES)}")
    if view.address % np.dtype(view.dtype).itemsize:
        raise ArgumentError(f"num_tokens must be aligned to its element, got address {view.address:#x}")
    if any(size != 1 for size in view.shape):
        raise ArgumentError(f"num_tokens has shape {list(view.shape)}, allowed: a number, or an array of one element")
    return view
