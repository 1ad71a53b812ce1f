"""Shapes and byte counts: what lies where in the symmetric arena, and what a handle owns. Pure functions, no device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuep.config import GroupConfig
from cuep.errors import ArgumentTypeError

ALIGNMENT = 256  # bytes; of every region of the arena
CONTROL_BYTES = 384  # struct Control in operation.cuh
CONTROL_OP_WORDS = 5  # 8-byte words of each operation in it: epoch, received, read_until, and four of 4 bytes
STATE_BYTES = 48  # struct HandleState
STATE_NUM_TOKENS = 36  # bytes before its num_tokens
REPORT_BYTES = 172  # struct Report
WORD_BYTES = 8  # {epoch, value}
MASK_BYTES = 40  # struct MaskWords of mask.cuh
# max_tokens_per_rank up to which rows travel as lines, by default
LINE_TOKENS = {("dispatch", "direct"): 128, ("combine", "direct"): 64, ("combine", "partial"): 128}
IN_PLACE = ("tokens", "scales")  # what lies in symmetric memory where rows are received in place
READY_BANKS = 2  # words of ht dispatch that say where a rank receives: see ht_receive.cuh
TRANSPORTS = ("push", "pull", "copy")  # how rows of an ht operation come to another rank: Transport of ht_walk.cuh
COPY_PARTS = 4  # copy: the rows for a rank come in so many parts
_HT_VARIANTS = {
    "flat": {"route": "ballot", "dispatch": "bulk", "combine": "push"},
    "expert_major": {"route": "slots", "dispatch": "expand", "combine": "partial"},
}
ROUTE_BANKS = 2  # count matrices: a rank that writes one has seen that all have read the last but one


@dataclass(frozen=True)
class Region:
    """A part of the arena. `is_words`: holds {epoch, value} words, which start out as the group's first epoch."""

    num_bytes: int
    is_words: bool = False


@dataclass(frozen=True)
class Arena:
    """Offsets of named regions in each rank's symmetric memory."""

    offsets: Mapping[str, int]
    regions: Mapping[str, Region]
    num_bytes: int


Shapes = dict[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype)


def arena(cfg: GroupConfig, num_ranks: int) -> Arena:
    regions = _ll_regions(cfg, num_ranks) if cfg.mode == "ll" else _ht_regions(cfg, num_ranks)
    offsets: dict[str, int] = {}
    end = 0
    for name, region in regions.items():
        offsets[name] = end
        end += -(-region.num_bytes // ALIGNMENT) * ALIGNMENT
    return Arena(offsets, regions, max(end, ALIGNMENT))


def _words(*shape: int) -> Region:
    return Region(math.prod(shape) * WORD_BYTES, is_words=True)


def _ll_regions(cfg: GroupConfig, num_ranks: int) -> dict[str, Region]:
    banks, tokens, topk = cfg.num_buffers, cfg.max_tokens_per_rank, cfg.num_topk
    local_experts, peers = cfg.num_experts // num_ranks, num_ranks - 1
    rows_home = peers if cfg.reduce == "per_rank" else topk if peers else 0  # of each token
    rows_out = Region(banks * peers * tokens * cfg.sent_row_bytes)
    has_lines = uses_lines(cfg, "dispatch")
    if has_lines:  # {k: expert, place, weight}, {token}
        rows_out = Region(banks * peers * tokens * slot_bytes(cfg.sent_row_bytes, topk + 1), is_words=True)
    combine_rows = Region(banks * tokens * rows_home * cfg.combine_sent_row_bytes)
    if uses_lines(cfg, "combine"):  # {gradient} of the k that the row is for
        num_packets = topk if cfg.reduce == "per_rank" else 1
        combine_rows = Region(
            banks * tokens * rows_home * slot_bytes(cfg.combine_row_bytes, num_packets), is_words=True
        )
    optional = {"mask": Region(num_ranks * MASK_BYTES + WORD_BYTES)} if cfg.mask else {}
    if cfg.in_place:
        optional["in_place"] = Region(cfg.in_place * in_place_bytes(cfg, num_ranks))
        optional["dispatch_ready"] = _words(banks, num_ranks)
    return optional | {
        "dispatch_rows": rows_out,
        "dispatch_headers": Region(0 if has_lines else banks * num_ranks * tokens * topk * 16),
        "dispatch_flags": _words(banks, num_ranks, tokens),
        "dispatch_counts": _words(banks, num_ranks, local_experts),
        "dispatch_totals": _words(banks, num_ranks),
        "dispatch_done": _words(banks, num_ranks),
        "combine_rows": combine_rows,
        "combine_grads": Region(banks * tokens * topk * 4),
        "combine_flags": _words(banks, num_ranks, tokens),
        "combine_totals": _words(banks, num_ranks),
        "combine_done": _words(banks, num_ranks),
    }


def flag_variant(cfg: GroupConfig, op: str) -> str:
    """The kernel of an operation in ll whose rows have flags beside them."""
    return "partial" if op == "combine" and cfg.reduce == "per_rank" else "direct"


def variant(cfg: GroupConfig, op: str) -> str:
    """The kernel of an operation in ll: as GroupConfig.variants says, else the one that is fastest for groups of this
    size (measured: kernels_cu/README.md)."""
    own = flag_variant(cfg, op)
    takes_lines = not (cfg.combine_quant if op == "combine" else cfg.in_place)
    if takes_lines and cfg.max_tokens_per_rank <= LINE_TOKENS[op, own]:
        own = {"direct": "line", "partial": "line_partial"}[own]
    return cfg.variants.get(op, own)


def uses_lines(cfg: GroupConfig, op: str) -> bool:
    """Whether the slots of an operation hold lines (line.cuh); of variants made by copying one, the name tells."""
    return variant(cfg, op).startswith("line")


def num_lines(row_bytes: int) -> int:
    """Of a row: two lines carry 15 times 16 bytes of it, the first of them 7 times."""
    pairs, left = divmod(-(-row_bytes // 16), 15)
    return 2 * pairs + (left > 0) + (left > 7)


def slot_bytes(row_bytes: int, num_packets: int) -> int:
    """A row as lines of 128 bytes, then packets of 16, padded to a line."""
    return (num_lines(row_bytes) + -(-num_packets // 8)) * 128


def _keeps_weights(cfg: GroupConfig) -> bool:
    """ll: whether a receiver needs the weights of its rows at combine."""
    return cfg.layout == "expert_major" and cfg.reduce == "per_rank"


def _ht_regions(cfg: GroupConfig, num_ranks: int) -> dict[str, Region]:
    buffers, rows, topk = cfg.num_buffers, max_recv_rows(cfg, num_ranks), cfg.num_topk
    messages = num_ranks * cfg.max_tokens_per_rank
    is_flat = cfg.layout == "flat"
    regions = {"recv_tokens": Region(buffers * rows * cfg.sent_row_bytes)}
    if is_flat:
        regions |= {
            "recv_topk_idx": Region(buffers * rows * topk * 4),
            "recv_topk_weights": Region(buffers * rows * topk * 4),
            "recv_source": Region(buffers * rows * 2 * 4),
        }
    else:
        regions["dispatch_headers"] = Region(messages * topk * 8)
    if transport(cfg, "dispatch") == "copy":
        regions |= {
            "dispatch_packed": Region((messages - cfg.max_tokens_per_rank) * cfg.sent_row_bytes),
            "dispatch_arrived": _words(COPY_PARTS, num_ranks),
        }
    else:
        regions |= {"dispatch_flags": _words(messages), "dispatch_arrived": _words(num_ranks)}
    counted = cfg.num_experts // num_ranks if is_flat else cfg.num_experts
    regions |= {
        "route_matrix": _words(ROUTE_BANKS, num_ranks, num_ranks),
        "route_counts": _words(ROUTE_BANKS, num_ranks, counted),
        "dispatch_ready": _words(READY_BANKS, num_ranks),
        "combine_totals": _words(num_ranks),
        "combine_done": _words(num_ranks),
    }
    if is_pulled(cfg):
        return regions | {
            "combine_rows": Region(buffers * rows * cfg.combine_row_bytes),
            "combine_grads": Region(rows * topk * 4),
        }
    staged = messages - (cfg.max_tokens_per_rank if is_flat else 0)  # flat: own rows are read where they are
    regions |= {
        "combine_rows": Region(staged * cfg.combine_row_bytes),
        "combine_grads": Region(staged * topk * 4),
    }
    if transport(cfg, "combine") != "copy":
        return regions | {"combine_flags": _words(messages)}
    return regions | {
        "combine_flags": _words(num_ranks, COPY_PARTS),
        "combine_left": _words(num_ranks),
        "combine_stamp": _words(1),
    }


def ht_variant(cfg: GroupConfig, op: str) -> str:
    """The kernel of an operation in ht: as GroupConfig.variants says, else the one that suits any number of
    multiprocessors and any array."""
    own = _HT_VARIANTS[str(cfg.layout)][op]
    return cfg.variants.get(op, own)


def transport(cfg: GroupConfig, op: str) -> str:
    """Of TRANSPORTS (ht flat): the one that the name of the operation's variant begins with. "pull" (combine) has
    combine buffers in symmetric memory, "copy" what the host's copies need; others are like "push"."""
    known = TRANSPORTS if op == "combine" else ("push", "copy")
    name = ht_variant(cfg, op) if cfg.layout == "flat" else ""
    return next((transport for transport in known if name.startswith(transport)), TRANSPORTS[0])


def is_pulled(cfg: GroupConfig) -> bool:
    """ht: whether combine reads rows where the experts' ranks have them, in combine buffers in symmetric memory."""
    return cfg.mode == "ht" and transport(cfg, "combine") == "pull"


def max_recv_rows(cfg: GroupConfig, num_ranks: int) -> int:
    """Rows of Received.tokens (ht): max_recv_tokens_per_rank, or as many as can ever come.

    flat: every token of every rank, once. expert_major: every (token, k) pair of every rank, since all may name one
    rank's experts, and the most padding that `alignment` can add to its experts' zones.
    """
    if cfg.max_recv_tokens_per_rank is not None:
        return cfg.max_recv_tokens_per_rank
    tokens = num_ranks * cfg.max_tokens_per_rank
    if cfg.layout == "flat":
        return tokens
    pairs = tokens * cfg.num_topk
    zones = min(cfg.num_experts // num_ranks, pairs)  # an empty one has no padding
    return (pairs + zones * (cfg.alignment - 1)) // cfg.alignment * cfg.alignment


def handle_arrays(cfg: GroupConfig, num_ranks: int, *, is_in_place: bool = False) -> Shapes:
    """What a handle owns outside the symmetric arena. is_in_place: it receives rows there."""
    tokens, topk = cfg.max_tokens_per_rank, cfg.num_topk
    local_experts = cfg.num_experts // num_ranks
    shapes: Shapes = {
        "state": ((STATE_BYTES // 8,), "uint64"),
        "ids": ((tokens, topk), "int32"),
        "weights": ((tokens, topk), "float32"),
        "y": ((tokens, cfg.hidden), str(cfg.combine_dtype)),
        "weight_grads": ((tokens, topk), "float32"),
        "expert_counts": ((local_experts,), "int32"),
        "total": ((1,), "int32"),
    }
    if cfg.mode == "ll":
        of_mode = _ll_handle_arrays(cfg, num_ranks)
        shapes |= {k: v for k, v in of_mode.items() if not (is_in_place and k in IN_PLACE)}
    else:
        shapes |= _ht_handle_arrays(cfg, num_ranks)
    return shapes


def _ht_handle_arrays(cfg: GroupConfig, num_ranks: int) -> Shapes:
    tokens, topk, rows = cfg.max_tokens_per_rank, cfg.num_topk, max_recv_rows(cfg, num_ranks)
    local_experts = cfg.num_experts // num_ranks
    scales: Shapes = {"out_scales": ((rows, cfg.scale_columns), cfg.scale_dtype)} if cfg.num_scales else {}
    shapes = scales | {
        "rows": ((tokens, num_ranks), "int32"),
        "send_base": ((num_ranks,), "int32"),
        "recv_base": ((num_ranks + 1,), "int32"),
    }
    if cfg.layout == "flat":  # the last three, and scales: what dispatch(out=) brings beside the caller's rows
        return shapes | {
            "src_rank_counts": ((num_ranks,), "int32"),
            "out_topk_idx": ((rows, topk), "int32"),
            "out_topk_weights": ((rows, topk), "float32"),
            "out_source": ((rows, 2), "int32"),
        }
    messages = num_ranks * tokens
    return shapes | {
        "slots": ((tokens, topk), "int32"),
        "src_rank_counts": ((local_experts, num_ranks), "int32"),
        "expert_offsets": ((local_experts + 1,), "int32"),
        "source": ((rows, 3), "int32"),
        "row_weights": ((rows,), "float32"),
        "message_slots": ((messages, topk), "int32"),
        "message_weights": ((messages, topk), "float32"),
    }


def _ll_handle_arrays(cfg: GroupConfig, num_ranks: int) -> Shapes:
    tokens, topk = cfg.max_tokens_per_rank, cfg.num_topk
    local_experts, rows = cfg.num_experts // num_ranks, num_ranks * tokens
    shapes: Shapes = {
        "tokens": ((*combine_shape(cfg, num_ranks)[:-1], cfg.columns), cfg.recv_dtype),
        "own_slot": ((tokens,), "int32"),
        "num_rows": ((num_ranks,), "int32"),
        "token_idx": ((num_ranks, tokens), "int32"),
    }
    if cfg.num_scales:
        zones, zone_rows, _ = combine_shape(cfg, num_ranks)
        scales = (zones, zone_rows, cfg.scale_columns)
        if cfg.scale_layout == "column_major":
            scales = (zones, cfg.scale_columns, scale_column_rows(cfg, zone_rows))
        shapes["scales"] = (scales, cfg.scale_dtype)
    if cfg.layout == "rank_major":
        return shapes | {
            "recv_topk_idx": ((num_ranks, tokens, topk), "int32"),
            "recv_topk_weights": ((num_ranks, tokens, topk), "float32"),
            "source": ((num_ranks, tokens, 2), "int32"),
            "src_rank_counts": ((num_ranks,), "int32"),
        }
    shapes |= {
        "source": ((local_experts, rows, 3), "int32"),
        "src_rank_counts": ((local_experts, num_ranks), "int32"),
        "row_idx": ((num_ranks, tokens, topk), "int32"),
    }
    if _keeps_weights(cfg):
        shapes["recv_weights"] = ((num_ranks, tokens, topk), "float32")
    return shapes


def in_place_bytes(cfg: GroupConfig, num_ranks: int) -> int:
    """ll: of the rows that a handle receives in place, [N, B] as they travel."""
    return num_ranks * cfg.max_tokens_per_rank * cfg.sent_row_bytes


def scale_column_rows(cfg: GroupConfig, zone_rows: int) -> int:
    """Elements from one column of scales to the next: columns begin at multiples of 16 bytes."""
    rows_per_piece = 16 // cfg.scale_bytes
    return -(-zone_rows // rows_per_piece) * rows_per_piece


def combine_shape(cfg: GroupConfig, num_ranks: int) -> tuple[int, ...]:
    """Of what combine takes, at its largest: that of Received.tokens."""
    if cfg.mode == "ht":
        return max_recv_rows(cfg, num_ranks), cfg.hidden
    if cfg.layout == "rank_major":
        return num_ranks, cfg.max_tokens_per_rank, cfg.hidden
    return cfg.num_experts // num_ranks, num_ranks * cfg.max_tokens_per_rank, cfg.hidden


def combine_buffer(cfg: GroupConfig, num_ranks: int) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of what Handle.combine_buffer returns."""
    return combine_shape(cfg, num_ranks), str(cfg.combine_dtype)


def workspace_arrays(cfg: GroupConfig, num_ranks: int) -> Shapes:
    """What a group owns outside the symmetric arena: control words, and room for refused calls that have no handle."""
    small = (
        "state",
        "expert_counts",
        "total",
        "src_rank_counts",
        "num_rows",
        "recv_base",
        "send_base",
        "expert_offsets",
    )
    shapes: Shapes = {f"refused_{k}": v for k, v in handle_arrays(cfg, num_ranks).items() if k in small}
    shapes["control"] = ((CONTROL_BYTES // 8,), "uint64")
    if cfg.arrival_stats:  # struct Arrivals of arrivals.cuh
        shapes["arrivals"] = ((10 * num_ranks + 1,), "uint64")
    if cfg.mode == "ht":
        shapes["high_water"] = ((cfg.num_buffers,), "int32")
    elif cfg.layout == "expert_major":
        shapes["expert_offsets"] = ((cfg.num_experts // num_ranks + 1,), "int32")
    return shapes


def dtype_of(name: Any) -> np.dtype[Any]:
    """NumPy's dtype; bfloat16 and float8 come from ml_dtypes."""
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        name = getattr(ml_dtypes, name)
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def num_bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * dtype_of(dtype).itemsize for shape, dtype in shapes.values())


def footprint(cfg: GroupConfig, num_ranks: int) -> dict[str, int]:
    """Bytes of device memory per rank, without any device.

    Returns:
        {"symmetric": per group, from the symmetric heap; "workspace": per group, from the allocator;
        "handle": per handle, from the allocator; "in_place_handle": the same of the first GroupConfig.in_place handles;
        "combine_buffer": per handle that asks for one, from the allocator, 0 where they are part of "symmetric"}. Equal
        to what is then requested.

    Raises:
        ArgumentError: the settings do not work on `num_ranks` ranks.
    """
    if not isinstance(cfg, GroupConfig):
        raise ArgumentTypeError(f"cfg must be a GroupConfig, got {type(cfg).__name__}")
    cfg.check_ranks(num_ranks)
    return {
        "symmetric": arena(cfg, num_ranks).num_bytes,
        "handle": num_bytes(handle_arrays(cfg, num_ranks)),
        "in_place_handle": num_bytes(handle_arrays(cfg, num_ranks, is_in_place=True)) if cfg.in_place else 0,
        "workspace": num_bytes(workspace_arrays(cfg, num_ranks)),
        "combine_buffer": 0 if is_pulled(cfg) else num_bytes({"": combine_buffer(cfg, num_ranks)}),
    }
