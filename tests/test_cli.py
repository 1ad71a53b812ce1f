"""The command line on one rank, as a person would start it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cuep import cli, demo_model, tables
from cuep.bench import report, runner, traffic, verify, workload
from cuep.bench.peers import nccl_ep
from cuep.errors import ArgumentError, BackendUnavailable

RECORD_KEYS = (
    "op peer variant mode layout reduce alignment zero_padding backend gpu ranks tokens hidden experts topk routing "
    "dtype quant scale_format combine_quant in_place with_out combine_buffer num_sms gemm graph us_median us_p10 "
    "us_p90 host_us host_cold_us bytes_remote bytes_total gb_per_s checked commit"
)


def cuep(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cuep", *arguments], capture_output=True, text=True, timeout=100)


def test_info_says_which_backend_and_what_is_missing(tmp_path):
    """E08: also on a machine with no GPU, driver or CuPy."""
    done = cuep("info", "--backend", "cpu", "--json", str(tmp_path / "info.json"))
    assert done.returncode == 0, done.stderr
    assert "backend cpu, because asked for" in done.stdout
    facts = json.loads((tmp_path / "info.json").read_text())
    assert facts["backend"]["name"] == "cpu" and facts["packages"]["numpy"] == np.__version__
    assert "C++ compiler" in facts["tools"] | facts["missing"]


def test_demo_runs_on_one_rank_without_a_launcher(tmp_path):
    """A21, E11: expert-parallel size 1, through the same calls and without mpiexec."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"one line\nanother line, longer than the first\n" * 4)
    done = cuep("demo", "--backend", "cpu", "--text", str(text))
    assert done.returncode == 0, done.stderr
    assert "one rank only" in done.stdout and done.stdout.endswith("demo: ok\n")


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_bench_writes_records_with_exactly_these_keys(mode, tmp_path):
    sizes = ["--tokens", "3", "--hidden", "32", "--experts", "4", "--topk", "2", "--iterations", "2"]
    done = cuep("bench", mode, "--backend", "cpu", "--check", *sizes, "--json", str(tmp_path / "records.json"))
    assert done.returncode == 0, done.stderr + done.stdout
    records = json.loads((tmp_path / "records.json").read_text())
    assert [record["op"] for record in records] == ["dispatch", "combine", "route+dispatch", "pair"]
    for record in records:
        assert list(record) == RECORD_KEYS.split()
        assert record["checked"] is True and record["us_p10"] <= record["us_median"] <= record["us_p90"]
        assert record["bytes_remote"] == 0 and record["bytes_total"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--backend", "cpu", "--text", "/nonexistent"], "--text /nonexistent cannot be read"),
        (["bench", "ll", "--backend", "cpu", "--hidden", "7"], "hidden=7 is not allowed"),
        (["bench", "ll", "--backend", "cpu", "--variant", "imaginary"], "variant 'imaginary' is not one of mode ll"),
        (["bench", "ht", "--backend", "cpu", "--staged"], "staged=True is not allowed with mode='ht'"),
        (["bench", "ll", "--backend", "cpu", "--floor"], "floor=True is not allowed with mode='ll'"),
        (["bench", "ll", "--backend", "cpu", "--peer", "nccl-ep"], "peer nccl-ep runs on GPUs only"),
        (
            ["bench", "ht", "--backend", "cpu", "--peer", "nccl-ep", "--layout", "expert_major"],
            "layout='expert_major' is not allowed with mode='ht'; allowed: 'flat'",
        ),
        (
            ["bench", "ht", "--backend", "cpu", "--peer", "nccl-ep", "--quant", "fp8_block128"],
            "quant='fp8_block128' is not allowed with mode='ht'; allowed: None",
        ),
        (
            ["bench", "ll", "--backend", "cpu", "--peer", "nccl-ep", "--quant", "forward"],
            "quant='forward' is not allowed; allowed: None or 'fp8_block128'",
        ),
        (["bench", "ll", "--topk", "17"], "topk=17 is not allowed; allowed: at most experts=16"),
        (["bench", "ll", "--gemm-columns", "8"], "gemm_columns=8 is not allowed without overlap"),
        (["bench", "ht", "--backend", "cpu", "--check", "--dtype", "foo"], "dtype='foo' is not allowed"),
        (["bench", "ll", "--json", "/nonexistent/file"], "must be a file in a folder that exists"),
        (["bench", "ll", "--tokens", "-4"], "must be a whole number of at least 1, got '-4'"),
    ],
)
def test_mistakes_end_in_one_clear_line(arguments, message):
    done = cuep(*arguments)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr


def test_importing_the_command_line_starts_neither_mpi_nor_cuda():
    check = "import sys, cuep.cli; print([m for m in ('mpi4py.MPI', 'cupy', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_variant_settings_name_every_operation_that_has_the_variant(monkeypatch):
    names = ["ll_dispatch_direct", "ll_dispatch_push", "ll_combine_direct", "ht_dispatch_push", "barrier_x"]
    monkeypatch.setattr("cuep.jit.kernel_names", lambda: names)
    assert runner.variant_settings("ll", "default") == {}
    assert runner.variant_settings("ll", "direct") == {"dispatch": "direct", "combine": "direct"}
    assert runner.variant_settings("ll", "push") == {"dispatch": "push"}
    assert runner.variant_settings("ll", "dispatch=push+combine=direct") == {"dispatch": "push", "combine": "direct"}
    with pytest.raises(ArgumentError, match=r"dispatch=direct, dispatch=push"):
        runner.variant_settings("ll", "combine=push")


def test_traffic_counts_rows_per_rank_and_per_expert():
    """2 ranks, 4 experts, rank 0: token 0 goes to both ranks, token 1 twice to rank 1, token 2 nowhere."""
    topk_idx = np.array([[0, 3], [2, 3], [-1, -1]], np.int32)
    assert traffic.dispatch(topk_idx, 0, 2, 4, 10) == traffic.Traffic(remote=20, total=30)
    assert traffic.combine(topk_idx, 0, 2, 4, 10, is_exact=True) == traffic.Traffic(remote=30, total=40)
    assert traffic.combine(topk_idx, 0, 2, 4, 10, is_exact=False) == traffic.Traffic(remote=20, total=30)


def test_skewed_routing_gives_one_expert_a_third_of_all_tokens():
    """Exactly, over all ranks; experts of a token stay distinct, the others share what is left."""
    options = workload.Options("ll", tokens=100, hidden=8, experts=16, topk=4, routing="skewed")
    ranks = [workload.routing(options, rank) for rank in range(4)]
    ids = np.concatenate(ranks)
    assert ids.dtype == np.int32 and ids.shape == (400, 4)
    assert (ids == 0).any(1).sum() == 134 and all(30 <= (rank == 0).sum() <= 37 for rank in ranks)
    assert all(len(set(row)) == 4 for row in ids)
    others = np.bincount(ids.ravel(), minlength=16)[1:]
    assert others.sum() == 1600 - 134 and others.min() > 0.6 * others.mean()
    np.testing.assert_array_equal(workload.routing(options, 2), ranks[2])
    uniform = workload.Options("ll", tokens=100, hidden=8, experts=16, topk=4)
    assert 10 < (workload.routing(uniform, 2) == 0).sum() < 40


def test_a_missing_peer_says_what_to_install(monkeypatch):
    for name in ("nccl", "nccl.core", "nccl.ep"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it then raises ImportError
    with pytest.raises(BackendUnavailable, match=r"peer nccl-ep .*pip install 'nccl-extensions\[cu13\]==0.1.0'"):
        nccl_ep.load()


def test_a_peer_may_round_but_not_be_wrong():
    expected = np.array([[1.0, -8.0], [0.5, 4.0]], np.float32)
    rounded = expected * np.float32(1 + 2.0**-7)
    assert verify.far_off(rounded, expected, is_quantised=False) == []
    for wrong in (np.nan, 4.25, -4):
        rounded[1, 1] = wrong
        assert "y differs in 1 of 4 values, first at [1, 1]" in verify.far_off(rounded, expected, is_quantised=False)[0]


def test_the_table_compares_a_peer_with_the_first_variant(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    options = workload.Options("ll", tokens=1, hidden=8, experts=2, topk=1, peer="nccl-ep", routing="skewed")
    shown = dict.fromkeys(RECORD_KEYS.split(), 0.0) | {"op": "pair", "peer": None}
    report.show(
        options,
        2,
        [
            shown | {"variant": "default", "us_median": 20.0},
            shown | {"variant": "direct", "us_median": 99.0},
            shown | {"variant": "0.2.0", "us_median": 30.0, "peer": "nccl-ep"},
        ],
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "skewed," in lines[0] and lines[1][:4] == ["op", "variant", "us_median", "peer/cuep"]
    assert [line[1:-6] for line in lines[2:]] == [
        ["default", "20", "-"],
        ["direct", "99", "-"],
        ["nccl-ep", "0.2.0", "30", "1.50"],
    ]


def test_demo_routing_is_skewed():
    """Some experts get many tokens, some none: what a real router does and random routing does not show."""
    text = Path(demo_model.__file__).read_bytes()
    model = demo_model.make_model(num_experts=16, num_topk=4, hidden=64, inner=64)
    topk_idx, weights = demo_model.route(model, demo_model.embed(model, text))
    load = np.sort(np.bincount(topk_idx.ravel(), minlength=16))
    assert (load[:2] == 0).all() and load[-1] > 3 * load.mean()
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    parts = demo_model.split_text(text, 3)
    assert sum(map(len, parts)) == len(text) and len(set(map(len, parts))) == 3


def test_plain_tables_line_up(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)  # importing it then raises ImportError
    tables.print_table("title", ["name", "us"], [["a", 1.234], ["longer", 12345.6], ["none", 7]])
    assert capsys.readouterr().out == "title\n  name        us\n  a         1.23\n  longer  12,346\n  none         7\n"


def test_compile_fails_if_a_kernel_does(monkeypatch, capsys):
    results = [
        cli.jit.CompileResult("k", "sm_90", {"kNumRanks": 4}, status, 0.5, "why") for status in ("cached", "failed")
    ]

    def compile_all(archs, report):
        assert archs == ["90", "cpu"]
        for result in results:
            report(result)
        return results

    monkeypatch.setattr(cli.jit, "compile_all", compile_all)
    assert cli.main(["compile", "--arch", "90,cpu"]) == 1
    assert "compile: 0 compiled, 1 cached, 0 skipped, 1 failed" in capsys.readouterr().out
    results.pop()
    assert cli.main(["compile", "--arch", "90,cpu"]) == 0


def test_import_is_light() -> None:
    """What takes long to import waits until it is needed."""
    code = "import sys, cuep; print([name for name in ('numpy', 'cupy', 'mpi4py') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[]\n"
