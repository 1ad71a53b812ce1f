"""One small checked benchmark of each form named, in one process: what compute-sanitizer watches in gpu_check.py.

mpirun -n 2 python -m mpi4py scripts/forms.py ll ll:rank_major ll:expert_major:per_rank ht:expert_major:per_rank:4
(mode[:layout[:reduce[:alignment]]])
"""

from __future__ import annotations

import sys

import cuep
from cuep.bench import runner
from cuep.bench.workload import Options


def options_of(form: str) -> Options:
    mode, layout, reduce, alignment = (*form.split(":"), "", "", "")[:4]
    return Options(
        mode,
        tokens=5,
        hidden=264,
        experts=8,
        topk=3,
        layout=layout or None,
        reduce=reduce or None,
        alignment=int(alignment or 1),
        check=True,
        iterations=1,
    )


def main() -> int:
    with cuep.init() as world, world.backend.active():
        wrong = []
        for form in sys.argv[1:]:
            wrong += [f"{form}: {text}" for text in runner.run(world, options_of(form))[1]]
            if world.rank == 0:
                print("ran", form, flush=True)
        for text in wrong:
            print("WRONG", text, flush=True)
        world.comm.barrier()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
