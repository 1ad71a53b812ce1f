"""Runs the operations of one mode for each variant asked for, and makes the records."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from cuep import jit
from cuep.bench import cases, floor, peers, records, verify
from cuep.bench.batch import Batch
from cuep.bench.cases import Case
from cuep.bench.gemm import Gemm
from cuep.bench.records import Record
from cuep.bench.timing import measure
from cuep.bench.workload import Options, group_config, make_inputs
from cuep.errors import ArgumentError
from cuep.group import Group
from cuep.world import World


def run(world: World, options: Options) -> tuple[list[Record], list[str]]:
    """Time every operation with every variant, then those of a peer. Collective.

    Returns the records and what `options.check` found wrong, one line each.

    Raises:
        ArgumentError: an unknown variant, or settings that the peer does not have. BackendUnavailable: a package that
        is needed is missing.
    """
    group_config(options, {}).check_ranks(world.size)
    chosen = [(name, variant_settings(options.mode, name)) for name in options.variants]
    peer = None if options.peer is None else peers.find(options.peer, world, options)
    bench = _Bench(world, options)
    for name, settings in chosen:
        bench.time_variant(name, settings)
    if options.floor:
        bench.time_floor()
    if peer is not None:
        with peer(world, options, bench.inputs, bench.stream) as batch:
            for case in cases.plain(batch, in_turn=True):
                bench.time(case, options, batch.version, peer=options.peer)
    return bench.records, bench.wrong


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


class _Bench:
    """What all operations of one run share, and what came of them."""

    def __init__(self, world: World, options: Options) -> None:
        self.records: list[Record] = []
        self.wrong: list[str] = []
        self.inputs = make_inputs(options, world.rank)
        self.stream = world.stream(is_urgent=options.overlap)
        self._world = world
        self._options = options
        self._expected = verify.expect(world, options) if options.check else None
        self._commit = records.commit()

    def time(
        self,
        case: Case,
        options: Options,
        variant: str,
        *,
        peer: str | None = None,
        expected: verify.Expected | None = None,
    ) -> None:
        """options: those of the groups that the case is about. expected: of its results, None: of cuep's."""
        world = self._world
        timing = measure(world, self.stream, case.operation, options.iterations, options.graph)
        wanted = expected or self._expected
        problems = [] if wanted is None else case.problems(world, wanted)
        self.wrong += [f"{peer or variant}: {case.operation.name}: {text}" for text in problems]
        checked = self._expected is not None and bool(case.batches) and not problems
        made = records.record(world, options, self.inputs, case, timing, checked=checked, variant=variant, peer=peer)
        self.records.append(made | {"commit": None if peer else self._commit})

    def time_variant(self, name: str, settings: dict[str, str]) -> None:
        options, world = self._options, self._world
        with Group(world, group_config(options, settings)) as group:
            first = Batch(world, group, options, self.inputs, self.stream)
            found = cases.plain(first)
            if options.staged:
                found += cases.staged(first)
            if options.overlap:
                second = Batch(world, group, options, self.inputs, self.stream)
                products = (Gemm(world, options, stream) for stream in (self.stream, world.stream()))
                found += cases.overlap(world.backend, first, second, *products, is_staged=options.mode == "ll")
            for case in found:
                self.time(case, options, name)
            group.check()
        if options.groups == 2:
            self._time_two_groups(name, settings)

    def time_floor(self) -> None:
        world, options = self._world, self._options
        plain = floor.options_of(options)
        expected = verify.expect(world, plain) if options.check else None
        with Group(world, group_config(plain, {})) as group:
            least = floor.Floor(world, group, options, self.inputs, self.stream)
            for case in floor.cases(least, options):
                self.time(case, options, floor.NAME, expected=expected)

    def _time_two_groups(self, name: str, settings: dict[str, str]) -> None:
        world = self._world
        half = max(1, world.backend.num_processors // 2)  # both must fit the device together
        options = replace(self._options, num_sms=self._options.num_sms or half)
        with ExitStack() as stack:
            groups = [stack.enter_context(Group(world, group_config(options, settings))) for _ in range(2)]
            streams = (self.stream, world.stream())
            batches = (
                Batch(world, group, options, self.inputs, stream) for group, stream in zip(groups, streams, strict=True)
            )
            for case in cases.two_groups(world.backend, *batches):
                self.time(case, options, name)
            for group in groups:
                group.check()
