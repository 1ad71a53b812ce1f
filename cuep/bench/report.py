"""The table that `cuep bench` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuep.bench import floor
from cuep.bench.records import Record
from cuep.bench.workload import Options, group_config
from cuep.tables import print_table

_COLUMNS = ("op", "variant", "us_median", "us_p10", "us_p90", "host_us", "host_cold_us", "gb_per_s", "checked")
_RATIO = "peer/cuep"
_FLOOR_RATIO = "cuep/floor"


def show(options: Options, num_ranks: int, records: Sequence[Record]) -> None:
    """One row per record; those of a peer say how many times cuep's time (of the first variant) they took, cuep's how
    many times that of the floor."""
    ratios = [*([_FLOOR_RATIO] if options.floor else []), *([_RATIO] if options.peer else [])]
    columns = (*_COLUMNS[:3], *ratios, *_COLUMNS[3:])
    floor_us = {record["op"]: record["us_median"] for record in records if record["variant"] == floor.NAME}
    floor_us |= {"route+dispatch": floor_us["dispatch"]} if floor_us else {}
    cuep_us: dict[str, float] = {}
    rows = []
    for record in records:
        cells: dict[str, Any] = {name: record[name] for name in _COLUMNS}
        if record["peer"] is None:
            cuep_us.setdefault(record["op"], record["us_median"])
            least = floor_us.get(record["op"])
            cells[_FLOOR_RATIO] = f"{record['us_median'] / least:.3f}" if least else None
        else:
            own = cuep_us.get(record["op"])
            cells["variant"] = f"{record['peer']} {record['variant']}"
            cells[_RATIO] = f"{record['us_median'] / own:.2f}" if own else None
        rows.append([cells.get(name) for name in columns])
    print_table(_title(options, num_ranks), columns, rows)


def _title(options: Options, num_ranks: int) -> str:
    config = group_config(options, {})
    form = f"{options.mode} {config.layout} {config.reduce}"
    form += f" alignment={config.alignment}" if config.alignment > 1 else ""
    form += " zero padding" if config.zero_padding else ""
    form += f" quant={config.quant} {config.scale_format}" if config.quant else ""
    form += f" combine_quant={config.combine_quant}" if config.combine_quant else ""
    form += " in place" if config.in_place else ""
    form += " with out" if options.with_out else ""
    form += " combine buffer" if options.combine_buffer else ""
    shape = " ".join(f"{name}={getattr(options, name)}" for name in ("tokens", "hidden", "experts", "topk"))
    shape += f" {options.routing}" if options.routing != "uniform" else ""
    how = "graph replays" if options.graph else "eager calls"
    return f"{form} {options.dtype} {shape}, {num_ranks} ranks, {how}, slowest rank, microseconds"
