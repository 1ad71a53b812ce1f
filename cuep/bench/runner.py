"""Runs the operations of one mode for each variant asked for, and makes the records."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cuep import jit, layout
from cuep.bench import traffic, verify
from cuep.bench.timing import Operation, Timing, measure
from cuep.bench.workload import Array, Inputs, Options, group_config, make_inputs, scale
from cuep.config import QUANT_BLOCK
from cuep.errors import ArgumentError
from cuep.group import Group
from cuep.world import World

Record = dict[str, Any]


def run(world: World, options: Options) -> tuple[list[Record], list[str]]:
    """Time every operation with every variant. Collective.

    Returns the records and what `options.check` found wrong, one line each.
    """
    chosen = [(name, variant_settings(options.mode, name)) for name in options.variants]
    inputs = make_inputs(options, world.rank)
    expected = verify.expect(world, options) if options.check else None
    commit = _commit()
    records, wrong = [], []
    for name, settings in chosen:
        for operation, timing, problems in _run_variant(world, options, settings, inputs, expected):
            wrong += [f"{name}: {text}" for text in problems]
            checked = options.check and not problems
            records.append(_record(world, options, name, operation, timing, checked, inputs) | {"commit": commit})
    return records, wrong


def variant_settings(mode: str, text: str) -> dict[str, str]:
    """GroupConfig.variants for one name given to --variant.

    "default" is cuep's own choice; "push" is that variant of every operation of the mode that has one; "dispatch=push"
    and "dispatch=push+combine=pull" name the operations.
    """
    known = known_variants(mode)
    if text == "default":
        return {}
    if "=" in text:
        settings = dict(pair.split("=", 1) for pair in text.split("+") if "=" in pair)
    else:
        settings = {op: text for op, names in known.items() if text in names}
    if not settings or any(name not in known.get(op, []) for op, name in settings.items()):
        available = ", ".join(f"{op}={name}" for op, names in known.items() for name in names)
        raise ArgumentError(f"variant {text!r} is not one of mode {mode}: default, {available}")
    return settings


def known_variants(mode: str) -> dict[str, list[str]]:
    """Operation -> its variants, from the names of the kernel files: <mode>_<operation>_<variant>.cu."""
    parts = [name.split("_", 2) for name in jit.kernel_names()]
    operations = sorted({part[1] for part in parts if part[0] == mode and len(part) == 3})
    return {operation: jit.variants(f"{mode}_{operation}") for operation in operations}


def _run_variant(
    world: World, options: Options, settings: dict[str, str], inputs: Inputs, expected: verify.Expected | None
) -> Iterator[tuple[str, Timing, list[str]]]:
    backend = world.backend
    stream = world.stream()
    x, topk_idx, topk_weights = (backend.asarray(a) for a in (inputs.x, inputs.topk_idx, inputs.topk_weights))
    with Group(world, group_config(options, settings)) as group:
        backend.synchronize()  # the arrays above were filled on another stream
        handle = group.create_handle(topk_idx, topk_weights, stream=stream)
        received = handle.dispatch(x, stream=stream)
        backend.stream(stream).synchronize()
        answers = _answers(world, options, received)
        backend.synchronize()

        def update() -> None:
            handle.update(topk_idx, topk_weights, stream=stream)

        def dispatch() -> None:
            handle.dispatch(x, stream=stream)

        def combine() -> None:
            handle.combine(answers, stream=stream)

        for operation in (
            Operation("dispatch", (dispatch,)),
            Operation("combine", (combine,), untimed=(dispatch,)),
            Operation("route+dispatch", (update, dispatch)),
            Operation("pair", (dispatch, combine)),
        ):
            timing = measure(world, stream, operation, options.iterations, options.graph)
            problems: list[str] = []
            if expected is not None:
                # Once more, after all those replays and on what they left behind.
                received = handle.dispatch(x, stream=stream)
                combined = handle.combine(answers, stream=stream)
                backend.stream(stream).synchronize()
                problems = verify.problems(world, expected, received, combined)
            yield operation.name, timing, problems
        group.check()


def _answers(world: World, options: Options, received: Any) -> Array:
    """The experts' answers to what was received: rows times scale(), NaN wherever no row is."""
    backend, xp = world.backend, world.backend.xp
    config = group_config(options, {})
    tokens = received.tokens.reshape(-1, config.hidden)
    scales: Any = received.scales
    dtype = layout.dtype_of(config.combine_dtype)
    answers = backend.empty(tokens.shape, dtype)
    values = None  # of each code
    if scales is not None:
        scales = scales.reshape(len(tokens), -1)
        codes = np.arange(256, dtype=np.uint8).view(layout.dtype_of(config.recv_dtype))
        values = backend.asarray(codes.astype(np.float32))

    def fill(first: int, end: int, num_rows: Array, owner: int) -> None:
        rows = tokens[first:end]
        if values is not None:
            blocks = values[rows.view(xp.uint8)].reshape(len(rows), -1, QUANT_BLOCK)
            rows = (blocks * scales[first:end, :, None]).reshape(rows.shape)
        is_row = xp.arange(len(rows)) < num_rows
        scaled = rows.astype(xp.float32) * xp.float32(scale(owner))
        answers[first:end] = xp.where(is_row[:, None], scaled, xp.float32("nan")).astype(dtype)

    if config.layout == "flat":
        fill(0, len(tokens), received.total[0], world.rank)
    elif config.layout == "rank_major":
        for src in range(world.size):
            most = config.max_tokens_per_rank
            fill(src * most, (src + 1) * most, received.src_rank_counts[src], world.rank)
    else:
        num_local = config.num_experts // world.size
        offsets = [int(offset) for offset in backend.to_numpy(received.expert_offsets)]
        for local, (first, end) in enumerate(itertools.pairwise(offsets)):
            fill(first, end, received.expert_counts[local], world.rank * num_local + local)
    return answers.reshape(received.tokens.shape)


def _record(
    world: World, options: Options, variant: str, operation: str, timing: Timing, checked: bool, inputs: Inputs
) -> Record:
    config = group_config(options, {})
    moved = _traffic(world, options, inputs, operation)
    return {
        "op": operation,
        "variant": variant,
        "mode": options.mode,
        "layout": config.layout,
        "reduce": config.reduce,
        "alignment": config.alignment,
        "backend": world.backend.name,
        "gpu": world.backend.description if world.backend.name == "cuda" else None,
        "ranks": world.size,
        "tokens": options.tokens,
        "hidden": options.hidden,
        "experts": options.experts,
        "topk": options.topk,
        "dtype": options.dtype,
        "quant": options.quant,
        "num_sms": options.num_sms,
        "graph": options.graph,
        "us_median": timing.us_median,
        "us_p10": timing.us_p10,
        "us_p90": timing.us_p90,
        "host_us": timing.host_us,
        "host_cold_us": timing.host_cold_us,
        "bytes_remote": moved.remote,
        "bytes_total": moved.total,
        "gb_per_s": round(moved.remote / timing.us_median / 1e3, 2) if timing.us_median else None,
        "checked": checked,
    }


def _traffic(world: World, options: Options, inputs: Inputs, operation: str) -> traffic.Traffic:
    """Bytes of the rank that moves the most, as the time is that of the slowest. Collective."""
    config = group_config(options, {})
    shape = (inputs.topk_idx, world.rank, world.size, options.experts)
    out = traffic.dispatch(*shape, config.sent_row_bytes)
    home = traffic.combine(*shape, config.combine_row_bytes, is_exact=config.reduce == "exact")
    mine = {"combine": home, "pair": out + home}.get(operation, out)
    everyone = world.comm.allgather((mine.remote, mine.total))
    return traffic.Traffic(*(int(v) for v in np.max(everyone, axis=0)))


def _commit() -> str | None:
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
