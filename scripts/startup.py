"""How long importing cuep and a first step take; rank 0 prints one line with the slowest rank's seconds."""

import json
import time

begin = time.monotonic()
import cuep  # noqa: E402

imported = time.monotonic()
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

from cuep import jit  # noqa: E402

with cuep.init() as world, world.backend.active():
    started = time.monotonic()
    cfg = cuep.GroupConfig(mode="ll", num_experts=256, hidden=7168, num_topk=8, max_tokens_per_rank=128)
    with cuep.Group(world, cfg) as group:
        ids = world.backend.asarray(np.arange(8, dtype=np.int32)[None])
        x = world.backend.asarray(np.ones((1, 7168), ml_dtypes.bfloat16))
        handle = group.create_handle(ids)
        handle.combine(handle.dispatch(x).tokens)
        group.check()
        used = time.monotonic()
    nvshmem_s = 0.0
    if world.backend.name == "cuda":
        from cuep import nvshmem

        running = nvshmem.running()
        nvshmem_s = running.start_seconds if running else 0.0
    seconds = {"import_s": imported - begin, "init_s": started - imported, "nvshmem_s": nvshmem_s}
    seconds["first_use_s"] = used - begin - nvshmem_s
    everyone = world.comm.allgather(seconds)
    if world.rank == 0:
        slowest = {name: round(max(rank[name] for rank in everyone), 3) for name in seconds}
        print("startup " + json.dumps(slowest | {"num_compiled": jit.stats.compiled}), flush=True)
