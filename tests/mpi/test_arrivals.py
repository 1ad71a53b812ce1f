"""GroupConfig.arrival_stats: who is late shows, on every other rank, on either backend."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from harness import to_device, verdict_comm
from moe import config, random_step, run_experts, run_step

import cuep

LATE_S = 0.06
FORMS: dict[str, dict[str, Any]] = {
    "lines": {"max_tokens_per_rank": 8},
    "flags": {"variants": {"dispatch": "direct", "combine": "direct"}},
    "flags, per_rank": {"reduce": "per_rank", "variants": {"dispatch": "direct", "combine": "partial"}},
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["dispatch", "combine"])
def test_a_late_rank_shows(world: Any, form: str, place: str) -> None:
    """Rank 1 comes late three times, to one of the operations: the others waited that long for it, and not for others
    (who answer only when they have what they need themselves, so in the other operation nobody is late)."""
    rounds, late = 3, 1
    with cuep.Group(world, config("ll", arrival_stats=True, **FORMS[form])) as group:
        step = random_step(world, group.cfg, 1, 8, masked=0)
        handle = run_step(world, group, step)  # whatever the first calls wait for
        before = group.arrival_stats(clear=True)
        assert all(stats.num_waits.shape == (world.size,) for stats in before.values())
        x = to_device(world, step.x)
        for _ in range(rounds):
            verdict_comm().Barrier()
            if place == "dispatch" and world.rank == late:
                time.sleep(LATE_S)
            recv = handle.dispatch(x)
            group.check()
            out = run_experts(group.cfg, world, recv)
            verdict_comm().Barrier()
            if place == "combine" and world.rank == late:
                time.sleep(LATE_S)
            handle.combine(out)
            group.check()
        stats = group.arrival_stats()
        seen, other = stats[place], stats["combine" if place == "dispatch" else "dispatch"]
        if world.rank != late:
            assert seen.num_waits[late] == rounds
            assert seen.longest_us[late] > LATE_S * 0.6e6
            assert seen.total_us[late] > rounds * LATE_S * 0.6e6
            assert other.longest_us[late] < LATE_S * 0.6e6
        assert seen.longest_us[world.rank] < LATE_S * 0.6e6
        assert (seen.total_us >= seen.longest_us).all()


def test_settings(world: Any) -> None:
    with cuep.Group(world, config("ll")) as group, pytest.raises(cuep.OrderError, match="arrival_stats=True"):
        group.arrival_stats()
    with pytest.raises(cuep.ArgumentError, match="arrival_stats=True is not allowed; allowed: False with mode='ht'"):
        config("ht", arrival_stats=True)
    plain, noted = (
        cuep.footprint(config("ll", arrival_stats=is_on), world.size)["workspace"] for is_on in (False, True)
    )
    assert noted == plain + 8 * (10 * world.size + 1)
    with cuep.Group(world, config("ll", arrival_stats=True)) as group:
        stats = group.arrival_stats()
        assert set(stats) == {"dispatch", "combine"}
        assert all((of.num_waits == 0).all() and (of.total_us == 0).all() for of in stats.values())
        assert np.isfinite(stats["dispatch"].longest_us).all()
