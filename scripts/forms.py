"""Checked benchmarks of each form named, all in one process, as the start takes longest.

mpirun -n 4 python -m mpi4py scripts/forms.py [--json FILE] ll:tokens=128 ll:tokens=128:layout=rank_major ht:tokens=4096
(mode[:setting=value...], as cuep.bench.workload.Options has them, 1 for True; several variants: with / between them)

Without tokens a form is a small one, for compute-sanitizer to watch; of ll both with lines and with flags, which are
different kernels. With tokens it is what `python -m cuep bench` times: hidden 7168, top-8 of 256, in a CUDA graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import cuep
from cuep import layout
from cuep.bench import runner
from cuep.bench.workload import Options, group_config

_ARE_BOOL = {field.name for field in dataclasses.fields(Options) if isinstance(field.default, bool)}


def options_of(form: str, *, has_graphs: bool) -> list[Options]:
    mode, *settings = form.split(":")
    given: dict[str, Any] = {}
    for name, value in (text.split("=", 1) for text in settings):
        given[name] = bool(int(value)) if name in _ARE_BOOL else int(value) if value.isdigit() else value
    if "variants" in given:
        given["variants"] = tuple(given["variants"].split("/"))
    if "tokens" in given:
        return [Options(mode, **({"hidden": 7168, "experts": 256, "topk": 8, "graph": has_graphs} | given), check=True)]
    small = {"tokens": 5, "hidden": 384 if "quant" in given else 264, "experts": 8, "topk": 3, "iterations": 1}
    with_lines = Options(mode, **(small | given), check=True)
    if mode == "ht":
        return [with_lines]
    home = layout.flag_variant(group_config(with_lines, {}), "combine")
    return [with_lines, dataclasses.replace(with_lines, variants=(f"dispatch=direct+combine={home}",))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="forms.py", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("forms", nargs="+", metavar="FORM")
    chosen = parser.parse_args()
    with cuep.init() as world, world.backend.active():
        records, wrong = [], []
        for form in chosen.forms:
            for options in options_of(form, has_graphs=world.backend.name == "cuda"):
                made, found = runner.run(world, options)
                records += made
                wrong += [f"{form}: {text}" for text in found]  # with the variant
                if world.rank == 0:
                    print("ran", form, *options.variants, flush=True)
                    if chosen.json:  # whatever happens to the next, this one is there
                        chosen.json.write_text(json.dumps(records, indent=1) + "\n")
        for text in wrong:
            print("WRONG", text, flush=True)
        world.comm.barrier()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
