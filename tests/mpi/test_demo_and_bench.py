"""The demo and the benchmarks on all ranks, in small: both check their own results."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from harness import to_host

import cuep
from cuep import demo
from cuep.bench import cases, experts, runner, verify
from cuep.bench.batch import Batch
from cuep.bench.floor import Floor
from cuep.bench.gemm import Gemm
from cuep.bench.timing import Operation, measure
from cuep.bench.workload import Options, group_config, make_inputs

PLAIN = ["dispatch", "combine", "route+dispatch", "pair"]
STAGED = ["dispatch send", "combine send", "staged pair"]
OVERLAP = ["gemms", "communication", "gemms + communication", "pipeline", "pipeline, 2 streams"]


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
    assert [record["op"] for record in records] == PLAIN
    assert all(record["checked"] and record["ranks"] == world.size for record in records)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_check_finds_a_wrong_answer(world, mode, monkeypatch):
    """Rank 0's experts multiply by something else than the check expects."""
    if world.rank == 0:
        monkeypatch.setattr(experts, "scale", lambda owner: 4.0)
    settings = Options(mode, tokens=16, hidden=64, experts=8, topk=4, check=True, iterations=1)
    _, wrong = runner.run(world, settings)
    assert any("combine: y differs" in line for line in wrong)


@pytest.mark.parametrize("form", [{"layout": "rank_major"}, {"reduce": "per_rank"}, {"scale_format": "ue8m0"}])
def test_bench_checks_quantised_rows(world, form):
    settings = Options(
        "ll", tokens=17, hidden=384, experts=8, topk=3, quant="fp8_block128", check=True, iterations=1, **form
    )
    records, wrong = runner.run(world, settings)
    assert wrong == []
    kinds = {(record["quant"], record["scale_format"]) for record in records}
    assert kinds == {("fp8_block128", form.get("scale_format", "fp32"))}


@pytest.mark.parametrize("form", [{}, {"reduce": "per_rank"}])
def test_bench_checks_rows_that_are_encoded(world, form):
    settings = Options(
        "ll", tokens=5, hidden=384, experts=8, topk=3, combine_quant="logfmt10", check=True, iterations=1, **form
    )
    records, wrong = runner.run(world, settings)
    assert wrong == []
    combine = records[1]
    assert combine["combine_quant"] == "logfmt10"
    if world.size > 1:
        assert combine["bytes_remote"] % 512 == 0  # a row: 384 + 96 + 24 bytes, padded


@pytest.mark.parametrize("form", [{}, {"layout": "rank_major"}, {"quant": "fp8_block128", "hidden": 128}])
def test_staged_calls_two_groups_and_pipelines_equal_the_oracle(world, form):
    settings = Options(
        "ll", tokens=5, hidden=72, experts=8, topk=3, check=True, iterations=1, graph=world.backend.name == "cuda",
        routing="skewed", staged=True, groups=2, overlap=True, gemm_columns=24,
    )  # fmt: skip
    settings = replace(settings, **form)
    records, wrong = runner.run(world, settings)
    assert wrong == []
    assert [record["op"] for record in records] == [*PLAIN, *STAGED, *OVERLAP, "pair, 2 groups"]
    of = {record["op"]: record for record in records}
    assert [name for name, record in of.items() if not record["checked"]] == ["gemms"]  # moves no rows
    assert {name for name, record in of.items() if record["gemm"] is not None} == {*OVERLAP} - {"communication"}
    shape = (8 // world.size, -(-world.size * 15 // 8), settings.hidden, 24)
    assert of["gemms"]["gemm"] == shape and of["gemms"]["bytes_total"] == 0
    assert of["pair"]["bytes_total"] == of["dispatch"]["bytes_total"] + of["combine"]["bytes_total"]
    for name in ("communication", "pipeline", "pair, 2 groups"):
        assert of[name]["bytes_total"] == 2 * of["pair"]["bytes_total"]
    assert of["pair, 2 groups"]["num_sms"] == world.backend.num_processors // 2 and of["pair"]["num_sms"] is None
    assert all(record["routing"] == "skewed" and record["peer"] is None for record in records)


@pytest.mark.parametrize("form", [{"mode": "ll"}, {"mode": "ht"}, {"mode": "ht", "quant": "fp8_block128"}])
def test_bench_into_the_callers_array(world, form):
    settings = Options(tokens=7, hidden=384, experts=8, topk=3, with_out=True, check=True, iterations=1, **form)
    records, wrong = runner.run(world, settings)
    assert wrong == []
    assert all(record["with_out"] and record["checked"] for record in records)


@pytest.mark.parametrize("form", [{"mode": "ll"}, {"mode": "ht"}, {"mode": "ht", "variants": ("combine=pull",)}])
def test_bench_from_the_combine_buffer(world, form):
    settings = Options(
        tokens=7, hidden=384, experts=8, topk=3, combine_buffer=True, overlap=True, check=True, iterations=1, **form
    )
    records, wrong = runner.run(world, settings)
    assert wrong == []
    assert all(record["combine_buffer"] and record["checked"] for record in records if record["op"] != "gemms")


@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize("form", [{}, {"layout": "expert_major", "scale_format": "ue8m0", "dtype": "float32"}])
def test_bench_sends_rows_that_were_quantised_before(world, mode, form):
    settings = Options(mode, tokens=7, hidden=384, experts=8, topk=3, quant="forward", check=True, iterations=1, **form)
    records, wrong = runner.run(world, settings)
    assert wrong == []
    assert all(record["quant"] == "forward" and record["checked"] for record in records)
    if world.size > 1:
        scales = 3 if "scale_format" in form else 12
        assert records[0]["bytes_remote"] % (384 + -(-scales // 16) * 16) == 0


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"layout": "expert_major", "alignment": 4},
        {"quant": "fp8_block128"},
        {"quant": "forward", "scale_format": "ue8m0"},
    ],
)
def test_high_throughput_beside_products_and_the_floor(world, form):
    settings = Options(
        "ht", tokens=9, hidden=128, experts=8, topk=3, check=True, iterations=1, graph=world.backend.name == "cuda",
        overlap=True, floor=True, num_sms=4, gemm_columns=24, **form,
    )  # fmt: skip
    records, wrong = runner.run(world, settings)
    assert wrong == []
    operations = [*PLAIN, *(name for name in OVERLAP if name != "pipeline")]
    assert [(r["op"], r["variant"]) for r in records] == [
        *((name, "default") for name in operations),
        *((name, "floor") for name in ("dispatch", "combine", "pair")),
    ]
    floor = {record["op"]: record for record in records if record["variant"] == "floor"}
    unchecked = [record["op"] for record in records if not record["checked"]]
    assert unchecked == ["gemms", *(floor if settings.quant else ())]
    for record in records[:2]:
        assert floor[record["op"]]["bytes_remote"] == record["bytes_remote"]


def test_the_floor_is_checked(world, monkeypatch):
    """Rows that were not pulled are found."""
    settings = Options("ht", tokens=9, hidden=128, experts=8, topk=3, check=True, iterations=1, floor=True)
    monkeypatch.setattr(Floor, "combine", lambda self: None)
    _, wrong = runner.run(world, settings)
    assert wrong and all("combine: y" in text for text in wrong)


def test_two_groups_of_high_throughput(world):
    if world.backend.name == "cuda":
        pytest.skip("GPUs need not run two cooperative kernels beside one another")
    settings = Options("ht", tokens=5, hidden=72, experts=8, topk=3, check=True, iterations=1, groups=2, num_sms=1)
    records, wrong = runner.run(world, settings)
    assert wrong == []
    assert [record["op"] for record in records] == [*PLAIN, "pair, 2 groups"] and records[-1]["checked"]


def test_check_finds_an_operation_that_did_nothing(world):
    """The results of an earlier one must not pass for its own."""
    settings = Options("ll", tokens=4, hidden=64, experts=8, topk=2)
    with cuep.Group(world, group_config(settings, {})) as group:
        batch = Batch(world, group, settings, make_inputs(settings, world.rank), world.stream())
        expected = verify.expect(world, settings)
        assert cases.plain(batch)[-1].problems(world, expected) == []
        case = cases.Case(Operation("nothing", ()), cases.PAIR, (), (batch,))
        found = case.problems(world, expected)
    assert any("dispatch: tokens" in text for text in found) and any("combine: y" in text for text in found)


def test_untimed_steps_do_not_count(world):
    """Steps before and after each time the operation runs, in order, and outside its time."""
    taken = []

    def step(letter):
        def work():
            taken.append(letter)
            if letter != "t":
                time.sleep(0.01)

        return work

    operation = Operation("o", (step("t"),), before=(step("b"),), after=(step("a"),))
    stream = world.stream()
    for graph in {False, world.backend.name == "cuda"}:
        timing = measure(world, stream, operation, 1, graph)
        assert "".join(taken) == "bta" * (len(taken) // 3) and len(taken) > 3
        assert timing.host_us < 5000 and timing.us_median < 5000


def test_the_product_is_one(world):
    settings = Options("ll", tokens=3, hidden=40, experts=8, topk=2, overlap=True, gemm_columns=24)
    stream = world.stream()
    gemm = Gemm(world, settings, stream)
    gemm()
    a, b, c = (to_host(world, array, stream).astype(np.float64) for array in (gemm.a, gemm.b, gemm.c))
    batch, rows = 8 // world.size, -(-world.size * 6 // 8)
    assert c.shape == (batch, rows, 24) and gemm.shape == (batch, rows, 40, 24)
    bound = 2.0 ** (-8 if world.backend.name == "cuda" else -20)
    assert (np.abs(c - a @ b) <= bound * (np.abs(a) @ np.abs(b))).all()
