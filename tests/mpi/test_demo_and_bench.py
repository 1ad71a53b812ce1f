"""The demo and the benchmarks on all ranks, in small: both check their own results."""

from __future__ import annotations

import pytest

from cuep import demo
from cuep.bench import runner
from cuep.bench.workload import Options


@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.parametrize("tokens", [1, 300])
def test_demo(world, tmp_path, tokens):
    """Also with a text of one token, which leaves all ranks but one empty (A01, A13)."""
    text = tmp_path / "text.txt"  # rank 0 reads its own
    text.write_bytes(b"a line\nand one that is longer than the others\n" * 10)
    assert demo.run(world, demo.Options(text=text, tokens=tokens, hidden=64, inner=64))


@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bench_results_equal_the_oracle(world, mode, dtype):
    settings = Options(
        mode, tokens=5, hidden=72, experts=8, topk=3, dtype=dtype, check=True, iterations=1,
        graph=world.backend.name == "cuda",
    )  # fmt: skip
    records, wrong = runner.run(world, settings)
    assert wrong == []
    assert [record["op"] for record in records] == ["dispatch", "combine", "route+dispatch", "pair"]
    assert all(record["checked"] and record["ranks"] == world.size for record in records)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_check_finds_a_wrong_answer(world, mode, monkeypatch):
    """Rank 0's experts multiply by something else than the check expects."""
    if world.rank == 0:
        monkeypatch.setattr(runner, "scale", lambda owner: 4.0)
    settings = Options(mode, tokens=16, hidden=64, experts=8, topk=4, check=True, iterations=1)
    _, wrong = runner.run(world, settings)
    assert any("combine: y differs" in line for line in wrong)


@pytest.mark.parametrize("form", [{"layout": "rank_major"}, {"reduce": "per_rank"}])
def test_bench_checks_quantised_rows(world, form):
    settings = Options(
        "ll", tokens=17, hidden=384, experts=8, topk=3, quant="fp8_block128", check=True, iterations=1, **form
    )
    records, wrong = runner.run(world, settings)
    assert wrong == []
    assert all(record["quant"] == "fp8_block128" for record in records)
