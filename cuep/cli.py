"""The command line: `python -m cuep info | demo | compile | bench`."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuep
from cuep import env, jit, mpiexec
from cuep.errors import CuepError
from cuep.world import World

# What figures are usually quoted for (on a GPU), and what a CPU does in seconds.
_BENCH_SIZES = {
    ("ll", "cuda"): {"tokens": 128, "hidden": 7168, "experts": 256, "topk": 8},
    ("ht", "cuda"): {"tokens": 4096, "hidden": 7168, "experts": 256, "topk": 8},
    ("ll", "cpu"): {"tokens": 16, "hidden": 512, "experts": 16, "topk": 4},
    ("ht", "cpu"): {"tokens": 64, "hidden": 512, "experts": 16, "topk": 4},
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 if all went well."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    num_ranks = getattr(options, "ranks", None)
    try:
        if num_ranks and num_ranks > 1 and not env.has_mpi_launcher():
            return mpiexec.run_ranks(num_ranks, given)
        status: int = options.run(options)
        return status
    except CuepError as error:
        print(f"cuep: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cuep", description=cuep.__doc__)
    parser.add_argument("--version", action="version", version=cuep.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="backend, devices, versions, paths, and what is missing")
    info.add_argument("--json", type=_file, metavar="FILE", help="also write the facts to FILE")
    _add_backend(info)
    info.set_defaults(run=_info)

    demo = commands.add_parser("demo", help="run an MoE layer on a text file and compare it with a dense layer")
    demo.add_argument("--text", type=Path, metavar="FILE", help="the text whose bytes are the tokens (README.md)")
    demo.add_argument("--tokens", type=_count, default=4096, help="bytes of the text that are used (%(default)s)")
    _add_backend(demo)
    _add_ranks(demo)
    demo.set_defaults(run=_demo)

    compile_ = commands.add_parser("compile", help="compile every kernel; needs no GPU or driver")
    compile_.add_argument("--arch", default="80,90,100", help="GPU architectures, or cpu, by comma (%(default)s)")
    compile_.set_defaults(run=_compile)

    bench = commands.add_parser("bench", help="time dispatch and combine")
    bench.add_argument("mode", choices=("ll", "ht"), help="low latency or high throughput")
    for name in ("tokens", "hidden", "experts", "topk"):
        sizes = "; ".join(
            f"{backend}: {_BENCH_SIZES['ll', backend][name]} or {_BENCH_SIZES['ht', backend][name]}"
            for backend in ("cuda", "cpu")
        )
        bench.add_argument(f"--{name}", type=_count, help=f"default for ll or ht: {sizes}")
    bench.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32 (%(default)s)")
    bench.add_argument("--layout", help="ll: expert_major or rank_major; ht: flat or expert_major (default: the first)")
    bench.add_argument("--reduce", help="exact or per_rank (default: the layout's)")
    bench.add_argument(
        "--quant",
        help="fp8_block128: rows are quantised while they are sent; forward: beforehand (default: not at all)",
    )
    bench.add_argument(
        "--scale-format", default="fp32", choices=("fp32", "ue8m0"), help="of the scales of --quant (%(default)s)"
    )
    bench.add_argument(
        "--in-place",
        action="store_true",
        help="ll rank_major: rows are received where peers put them (default: copied)",
    )
    bench.add_argument(
        "--combine-quant", help="logfmt10 or fp8_block128: how combine's rows travel (ll; default: as is)"
    )
    bench.add_argument(
        "--with-out", action="store_true", help="dispatch puts rows into an array of the caller's (default: cuep's own)"
    )
    bench.add_argument(
        "--combine-buffer",
        action="store_true",
        help="the experts' answers lie in Handle.combine_buffer() (default: in any array)",
    )
    bench.add_argument("--alignment", type=_count, default=1, help="of zones, ht expert_major (%(default)s)")
    bench.add_argument("--zero-padding", action="store_true", help="dispatch zeroes the padding of zones")
    bench.add_argument("--num-sms", type=_count, help="blocks a kernel may use (default: cuep's choice)")
    bench.add_argument(
        "--routing",
        default="uniform",
        choices=("uniform", "skewed"),
        help="random with a fixed seed. uniform: all experts equally likely; skewed: a third of all ranks' tokens have"
        " expert 0 among theirs, other places go to the other experts (%(default)s)",
    )
    bench.add_argument(
        "--staged", action="store_true", help="ll: also time the send phases alone, and a pair of staged calls"
    )
    bench.add_argument(
        "--groups",
        type=int,
        default=1,
        choices=(1, 2),
        help="2: also time two groups, each running the pair in a stream of its own at the same time, until both are"
        " through; each may use --num-sms blocks, or half of the multiprocessors (ht kernels are cooperative launches,"
        " which a GPU need not run beside one another: such a run can end in PeerTimeout)",
    )
    bench.add_argument(
        "--overlap",
        action="store_true",
        help="also time two micro-batches with matrix products each: the products, the communication, one after the"
        " other, and pipelines that hide communication behind the products: with two streams and, ll, a staged one",
    )
    bench.add_argument(
        "--gemm-columns",
        type=_count,
        metavar="N",
        help="of these products, [rows, hidden] x [hidden, N] for each expert, with the rows that it gets on average;"
        " bfloat16, float32 on a CPU (256)",
    )
    bench.add_argument(
        "--floor",
        action="store_true",
        help="ht: also time the simplest kernels that move the same rows (push them; pull them and add up), and print"
        " cuep's time over theirs (--check looks at its results, too, but not with --quant)",
    )
    bench.add_argument(
        "--peer",
        choices=("nccl-ep",),
        help="also time this library on the same inputs: NCCL EP, ll or ht flat, bfloat16, on GPUs; needs its packages"
        " and nvcc; --check allows it roundings of bfloat16",
    )
    bench.add_argument("--graph", action=argparse.BooleanOptionalAction, help="replay CUDA graphs (default on a GPU)")
    bench.add_argument("--eager", dest="graph", action="store_false", help="enqueue every call (all there is on a CPU)")
    bench.add_argument("--check", action="store_true", help="compare results with the oracle, bit by bit")
    bench.add_argument("--variant", default="default", metavar="A,B", help="kernel variants, side by side")
    bench.add_argument("--iterations", type=_count, default=20, help="samples per figure (%(default)s)")
    bench.add_argument("--json", type=_file, metavar="FILE", help="write the records to FILE")
    _add_backend(bench)
    _add_ranks(bench)
    bench.set_defaults(run=_bench)
    return parser


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", choices=("auto", "cpu", "cuda"))


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=_count, metavar="N", help="start N ranks with mpiexec, if none started this")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return path


def _info(options: argparse.Namespace) -> int:
    from cuep import info

    facts = info.collect(lambda: cuep.init(backend=options.backend))
    info.show(facts)
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from cuep import demo

    settings = demo.Options(text=options.text, tokens=options.tokens)
    return _on_world(options, lambda world: 0 if demo.run(world, settings) else 1)


def _compile(options: argparse.Namespace) -> int:
    def report(result: jit.CompileResult) -> None:
        constants = " ".join(f"{name}={value}" for name, value in result.constants.items())
        print(f"{result.status:<8} {result.target:<7} {result.name}  {constants}  {result.seconds:.2f} s", flush=True)
        if result.message:
            print(result.message)

    results = jit.compile_all(options.arch.split(","), report)
    by_status = {
        status: sum(r.status == status for r in results) for status in ("compiled", "cached", "skipped", "failed")
    }
    print("compile: " + ", ".join(f"{count} {status}" for status, count in by_status.items()))
    return 1 if by_status["failed"] or by_status["skipped"] or not results else 0


def _bench(options: argparse.Namespace) -> int:
    return _on_world(options, lambda world: _bench_on(world, options))


def _bench_on(world: World, options: argparse.Namespace) -> int:
    from cuep.bench import report, runner, workload

    sizes = {
        name: getattr(options, name) or default
        for name, default in _BENCH_SIZES[options.mode, world.backend.name].items()
    }
    is_gpu = world.backend.name == "cuda"
    settings = workload.Options(
        mode=options.mode,
        **sizes,
        dtype=options.dtype,
        layout=options.layout,
        reduce=options.reduce,
        quant=options.quant,
        scale_format=options.scale_format,
        combine_quant=options.combine_quant,
        in_place=2 if options.in_place else 0,  # two handles at most are timed
        alignment=options.alignment,
        zero_padding=options.zero_padding,
        num_sms=options.num_sms,
        routing=options.routing,
        with_out=options.with_out,
        combine_buffer=options.combine_buffer,
        staged=options.staged,
        groups=options.groups,
        overlap=options.overlap,
        floor=options.floor,
        gemm_columns=options.gemm_columns,
        peer=options.peer,
        graph=is_gpu and options.graph is not False,
        check=options.check,
        iterations=options.iterations,
        variants=tuple(options.variant.split(",")),
    )
    is_first = world.rank == 0
    if is_first:
        print(f"backend: {world.backend.name} ({world.backend.description}), because {world.backend_reason}")
        if options.graph and not is_gpu:
            print("a CPU has no graphs: calls are eager")
    records, wrong = runner.run(world, settings)
    if is_first:
        report.show(settings, world.size, records)
        for text in wrong:
            print(f"WRONG {text}")
        if options.json:
            options.json.write_text(json.dumps(records, indent=1) + "\n")
    return 1 if wrong else 0


def _on_world(options: argparse.Namespace, body: Callable[[World], int]) -> int:
    """Run a collective command. An error on one rank ends them all: the others would wait for it."""
    with cuep.init(backend=options.backend) as world, world.backend.active():
        if world.size == 1 and not options.ranks:
            print("one rank only: start with `mpiexec -n 4 python -m cuep ...`, or add --ranks 4, for more")
        try:
            status = body(world)
            sys.stdout.flush()
            world.comm.barrier()  # under `-m mpi4py` a rank that returns 1 ends the job, and rank 0 may still print
            return status
        except Exception as error:
            if world.size == 1:
                raise
            if world.rank and isinstance(error, CuepError):
                time.sleep(1)  # mostly all ranks raise the same, and rank 0, by then, has said so and ended the job
            text = str(error) if isinstance(error, CuepError) else traceback.format_exc()
            print(f"cuep: rank {world.rank}: {type(error).__name__}: {text}", file=sys.stderr, flush=True)
            comm: Any = world.comm
            comm.Abort(1)
            raise SystemExit(1) from None
