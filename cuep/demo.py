"""`python -m cuep demo`: one MoE layer on the bytes of a text file, in both modes, compared with a dense layer.

    embed -> route -> dispatch -> experts -> combine

Every rank owns E/N experts and some lines of the text. The low-latency mode takes them a few tokens at a time, as a
server does; the high-throughput mode takes them all at once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cuep import reference
from cuep.bench import traffic
from cuep.config import GroupConfig
from cuep.demo_model import LocalExperts, embed, make_model, route, split_text
from cuep.errors import ArgumentError
from cuep.group import Group
from cuep.tables import print_table
from cuep.world import World

_LL_TOKENS = 64  # tokens per rank and step of the low-latency mode
_BF16_ROUNDING = 2.0**-8  # relative error of one rounding to bfloat16
_PHASES = ("route", "dispatch", "experts", "combine")


@dataclass(frozen=True)
class Options:
    text: Path | None = None  # None: README.md
    tokens: int = 4096  # bytes of the text that are used, over all ranks
    experts: int = 16
    topk: int = 4
    hidden: int = 256
    inner: int = 512


@dataclass
class Outcome:
    """What one mode did on this rank."""

    y: reference.Array  # [T, H]
    expert_rows: reference.Array  # [L], summed over steps
    num_steps: int
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class Job:
    """This rank's part of the layer's input, and the experts it owns."""

    x: reference.Array  # [T, H] bfloat16
    topk_idx: reference.Array  # [T, K]
    topk_weights: reference.Array  # [T, K]
    experts: LocalExperts
    options: Options


def run(world: World, options: Options) -> bool:
    """Run the layer in both modes, print what happened on rank 0, and say whether all is right. Collective."""
    name, text = _read_text(world, options)
    model = make_model(options.experts, options.topk, options.hidden, options.inner)
    x = embed(model, split_text(text, world.size)[world.rank])
    topk_idx, topk_weights = route(model, x)
    job = Job(x, topk_idx, topk_weights, LocalExperts(world.backend, model, world.rank, world.size), options)
    if world.rank == 0:
        _print_heading(world, options, name, len(text))
    dense = reference.dense_moe(x, topk_idx, topk_weights, model.experts)
    outcomes = {"ll": _run_low_latency(world, job), "ht": _run_high_throughput(world, job)}
    return _report(world, job, outcomes, dense)


def error_bound(dense: reference.Dense, num_topk: int, num_ranks: int) -> reference.Double:
    """How far a right result can be from the dense layer's, per element [T, H].

    1. Experts compute in float32: dense.error.
    2. Answers are rounded to bfloat16 before they travel: each answer (ll), or each rank's weighted sum of its answers
       (ht). Either way at most 2^-8 of the sum of |w||answer|, errors of 1 included.
    3. Weights and sums are float32: one product, at most K additions, and in ht N more for the ranks' rows.
    4. The result is rounded to bfloat16 once: at most 2^-8 of what it is.
    """
    answers = dense.magnitude + dense.error
    moved = _BF16_ROUNDING * answers
    summed = reference.gamma(num_topk + num_ranks + 1) * (answers + moved)
    error = dense.error + moved + summed
    return error + _BF16_ROUNDING * (np.abs(dense.output) + error)


def _run_low_latency(world: World, job: Job) -> Outcome:
    """Steps of at most _LL_TOKENS tokens; ranks whose text has ended go on with none."""
    options = job.options
    num_steps = max(world.comm.allgather(-(-len(job.x) // _LL_TOKENS)))
    outcome = Outcome(np.empty_like(job.x), np.zeros(options.experts // world.size, np.int64), num_steps)
    with Group(world, _config(options, "ll", _LL_TOKENS)) as group:
        handle = None
        for first in range(0, num_steps * _LL_TOKENS, _LL_TOKENS):
            tokens = slice(first, first + _LL_TOKENS)
            x, topk_idx, topk_weights = _on_device(world, job, tokens)
            with _phase(world, outcome, "route"):
                if handle is None:
                    handle = group.create_handle(topk_idx, topk_weights)
                else:
                    handle.update(topk_idx, topk_weights)
            with _phase(world, outcome, "dispatch"):
                received = handle.dispatch(x)
            with _phase(world, outcome, "experts"):
                counts = handle.host_counts()
                answers = world.backend.xp.empty_like(received.tokens)
                for local, count in enumerate(counts):
                    answers[local, :count] = job.experts(local, received.tokens[local, :count]).astype(answers.dtype)
            with _phase(world, outcome, "combine"):
                y = handle.combine(answers)
            outcome.y[tokens] = world.backend.to_numpy(y)
            outcome.expert_rows += counts
        group.check()
    return outcome


def _run_high_throughput(world: World, job: Job) -> Outcome:
    """All tokens in one step. A row arrives once per rank, which sums the weighted answers of its own experts."""
    xp, options = world.backend.xp, job.options
    max_tokens = max(1, *world.comm.allgather(len(job.x)))
    outcome = Outcome(job.x, np.zeros(options.experts // world.size, np.int64), 1)
    x, topk_idx, topk_weights = _on_device(world, job, slice(None))
    with Group(world, _config(options, "ht", max_tokens)) as group:
        with _phase(world, outcome, "route"):
            handle = group.create_handle(topk_idx, topk_weights)
        with _phase(world, outcome, "dispatch"):
            received = handle.dispatch(x)
        with _phase(world, outcome, "experts"):
            total = handle.num_recv_tokens()
            rows = received.tokens[:total].astype(xp.float32)
            ids, weights = received.topk_idx[:total], received.topk_weights[:total]
            sums = xp.zeros_like(rows)
            for local in range(len(outcome.expert_rows)):
                chosen = xp.flatnonzero((ids == local).any(1))
                weight = xp.where(ids[chosen] == local, weights[chosen], 0).sum(1, keepdims=True)
                sums[chosen] += weight * job.experts(local, rows[chosen])
            answers = xp.empty_like(received.tokens)
            answers[:total] = sums.astype(answers.dtype)
        with _phase(world, outcome, "combine"):
            y = handle.combine(answers)
        outcome.y = world.backend.to_numpy(y)
        outcome.expert_rows += handle.host_counts()
        group.check()
    return outcome


def _config(options: Options, mode: str, max_tokens: int) -> GroupConfig:
    return GroupConfig(
        mode=mode,
        num_experts=options.experts,
        hidden=options.hidden,
        num_topk=options.topk,
        max_tokens_per_rank=max_tokens,
        dtype="bfloat16",
    )


def _on_device(world: World, job: Job, tokens: slice) -> tuple[Any, Any, Any]:
    return tuple(world.backend.asarray(a[tokens]) for a in (job.x, job.topk_idx, job.topk_weights))


@contextmanager
def _phase(world: World, outcome: Outcome, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    world.backend.synchronize()
    outcome.seconds[name] += time.perf_counter() - start


def _read_text(world: World, options: Options) -> tuple[str, bytes]:
    """Rank 0 reads the file: the others may be on hosts that do not have it."""
    path = options.text or _default_text()
    content: bytes | str = b""
    if world.rank == 0:
        try:
            content = path.read_bytes()[: options.tokens]
        except OSError as error:
            content = f"--text {path} cannot be read: {error.strerror}"
    content = world.comm.bcast(content)
    if isinstance(content, str):
        raise ArgumentError(content)
    return str(path), content


def _default_text() -> Path:
    """The repository's README.md; in an installed package, which has none, this file."""
    readme = Path(__file__).resolve().parents[1] / "README.md"
    return readme if readme.is_file() else Path(__file__)


def _print_heading(world: World, options: Options, name: str, num_bytes: int) -> None:
    print(f"cuep demo: {num_bytes} bytes of {name} as tokens on {world.size} rank{'s' * (world.size > 1)}")
    print(f"backend: {world.backend.name} ({world.backend.description}), because {world.backend_reason}")
    sizes = f"hidden {options.hidden}, inner {options.inner}, bfloat16"
    print(f"layer: {options.experts} experts, top-{options.topk}, {sizes}", flush=True)


def _report(world: World, job: Job, outcomes: dict[str, Outcome], dense: reference.Dense) -> bool:
    """Compare with the dense layer on every rank; rank 0 prints."""
    bound = error_bound(dense, job.options.topk, world.size)
    is_right, rows = True, []
    for mode, outcome in outcomes.items():
        error = np.abs(outcome.y.astype(np.float64) - dense.output)
        # written so that NaN is wrong
        mine = (bool((error <= bound).all()), float(error.max(initial=0)), float((error / bound).max(initial=0)))
        verdicts = world.comm.allgather((mine, dict(outcome.seconds), _traffic(world, job, mode)))
        is_right = is_right and all(verdict[0][0] for verdict in verdicts)
        row: list[Any] = [mode, outcome.num_steps]
        row += [sum(verdict[2][i] for verdict in verdicts) / 1e6 for i in range(2)]
        row += [max(verdict[1][name] for verdict in verdicts) * 1e3 for name in _PHASES]
        row += [max(verdict[0][i] for verdict in verdicts) for i in (1, 2)]
        rows.append(row)
    received = world.comm.allgather((len(job.x), *(outcome.expert_rows.tolist() for outcome in outcomes.values())))
    if world.rank == 0:
        _print_tables(rows, received)
        if not is_right:
            print("demo: FAILED: the output is farther from the dense layer than rounding can take it")
        else:
            print("demo: ok", flush=True)
    return is_right


def _print_tables(rows: list[list[Any]], received: list[Any]) -> None:
    per_rank = [
        [rank, num_tokens, sum(ll), " ".join(map(str, ll)), "yes" if ll == ht else " ".join(map(str, ht))]
        for rank, (num_tokens, ll, ht) in enumerate(received)
    ]
    print_table(
        "Tokens per rank, and what its experts received",
        ["rank", "tokens", "rows of its experts", "rows of each expert", "the same in ht"],
        per_rank,
    )
    names = ["steps", "MB to other ranks", "MB in all", *(f"{name} ms" for name in _PHASES)]
    names += ["largest error", "error / bound (at most 1)"]
    lines = [[name, *(row[i + 1] for row in rows)] for i, name in enumerate(names)]
    print_table("Both modes: MB of all ranks, ms and errors of the worst", ["", *(row[0] for row in rows)], lines)


def _traffic(world: World, job: Job, mode: str) -> tuple[int, int]:
    """Bytes of rows of dispatch and combine that belong to this rank's tokens: to other ranks, and in all."""
    row_bytes = job.x.shape[1] * job.x.itemsize
    shape = (job.topk_idx, world.rank, world.size, job.options.experts, row_bytes)
    moved = traffic.dispatch(*shape) + traffic.combine(*shape, is_exact=mode == "ll")
    return moved.remote, moved.total
