"""What `cuep bench` writes about each operation."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from cuep.bench import traffic
from cuep.bench.cases import Case
from cuep.bench.timing import Timing
from cuep.bench.workload import Inputs, Options, group_config
from cuep.world import World

Record = dict[str, Any]


def record(
    world: World,
    options: Options,
    inputs: Inputs,
    case: Case,
    timing: Timing,
    *,
    checked: bool,
    variant: str,
    peer: str | None = None,
) -> Record:
    """One operation with its settings. `options` are those of the groups that did it. Collective."""
    config = group_config(options, {})
    moved = _traffic(world, options, inputs, case.moves)
    return {
        "op": case.operation.name,
        "peer": peer,
        "variant": variant,
        "mode": options.mode,
        "layout": config.layout,
        "reduce": config.reduce,
        "alignment": config.alignment,
        "zero_padding": config.zero_padding,
        "backend": world.backend.name,
        "gpu": world.backend.description if world.backend.name == "cuda" else None,
        "ranks": world.size,
        "tokens": options.tokens,
        "hidden": options.hidden,
        "experts": options.experts,
        "topk": options.topk,
        "routing": options.routing,
        "dtype": options.dtype,
        "quant": options.quant,
        "scale_format": options.scale_format if options.quant else None,
        "combine_quant": options.combine_quant,
        "in_place": options.in_place,
        "with_out": options.with_out,
        "combine_buffer": options.combine_buffer,
        "num_sms": options.num_sms,
        "gemm": case.gemm,
        "graph": options.graph,
        "us_median": timing.us_median,
        "us_p10": timing.us_p10,
        "us_p90": timing.us_p90,
        "host_us": timing.host_us,
        "host_cold_us": timing.host_cold_us,
        "bytes_remote": moved.remote,
        "bytes_total": moved.total,
        "gb_per_s": round(moved.remote / timing.us_median / 1e3, 2) if timing.us_median and case.moves else None,
        "checked": checked,
    }


def _traffic(world: World, options: Options, inputs: Inputs, moves: tuple[str, ...]) -> traffic.Traffic:
    """Bytes of the rank that moves the most, as the time is that of the slowest. Collective."""
    config = group_config(options, {})
    shape = (inputs.topk_idx, world.rank, world.size, options.experts)
    home, sent = (
        traffic.combine(*shape, row_bytes, is_exact=config.reduce == "exact")
        for row_bytes in (config.combine_row_bytes, config.combine_sent_row_bytes)
    )
    of_one = {
        "dispatch": traffic.dispatch(*shape, config.sent_row_bytes),
        "combine": traffic.Traffic(sent.remote, home.total - home.remote + sent.remote),  # own rows are not encoded
    }
    mine = sum((of_one[move] for move in moves), traffic.Traffic(0, 0))
    everyone = world.comm.allgather((mine.remote, mine.total))
    return traffic.Traffic(*(int(v) for v in np.max(everyone, axis=0)))


def commit() -> str | None:
    """Commit of the source tree that is being measured, "-dirty" where it was changed; None outside a git checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return shown.stdout.strip() if shown.returncode == 0 else None
