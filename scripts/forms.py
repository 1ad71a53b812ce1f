"""One small checked benchmark of each form named, in one process: what compute-sanitizer watches in gpu_check.py.

mpirun -n 2 python -m mpi4py scripts/forms.py ll ll:layout=rank_major ht:layout=expert_major:alignment=4
(mode[:setting=value...], as cuep.bench.workload.Options has them, 1 for True; ll with few tokens and with more, as
these are different kernels)
"""

from __future__ import annotations

import sys
from typing import Any

import cuep
from cuep import layout
from cuep.bench import runner
from cuep.bench.workload import Options

TOKENS = {"ll": (5, layout.LINE_TOKENS + 1), "ht": (5,)}


def options_of(form: str, tokens: int) -> Options:
    mode, *settings = form.split(":")
    given: dict[str, Any] = {
        name: int(value) if value.isdigit() else value for name, value in (text.split("=") for text in settings)
    }
    given |= {name: bool(given[name]) for name in ("zero_padding", "with_out") if name in given}
    hidden = 384 if "quant" in form else 264
    return Options(mode, tokens=tokens, hidden=hidden, experts=8, topk=3, check=True, iterations=1, **given)


def main() -> int:
    with cuep.init() as world, world.backend.active():
        wrong = []
        for form in sys.argv[1:]:
            for tokens in TOKENS[form[:2]]:
                found = runner.run(world, options_of(form, tokens))[1]
                wrong += [f"{form}, {tokens} tokens: {text}" for text in found]
                if world.rank == 0:
                    print("ran", form, tokens, flush=True)
        for text in wrong:
            print("WRONG", text, flush=True)
        world.comm.barrier()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
