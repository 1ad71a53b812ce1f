"""cuep.jit: what is a new unit, how ranks share a build, what a failure says."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_folder import CONSTANTS, KERNEL, ThreadComm, call, on_threads, unit

from cuep import cache, jit
from cuep.errors import ArgumentError, BackendUnavailable, CompileError, CuepError

pytest_plugins = ("kernel_folder",)
pytestmark = pytest.mark.usefixtures("folders")


def test_names_and_variants(folders: Path) -> None:
    (folders / "copy_fast.cu").write_text(KERNEL)
    assert jit.kernel_names() == ["copy_fast", "copy_plain"]
    assert jit.variants("copy") == ["fast", "plain"]
    assert jit.variants("other") == []
    assert jit.tunables("copy_plain") == {"kNumThreads": (512, 64)}
    assert jit.samples("copy_plain")[1] == {"kNumRanks": 2, "kHidden": 32, "kNumThreads": 96, "elem_t": "float"}


def test_render() -> None:
    text = jit.render("copy_plain", {**CONSTANTS, "kOn": True, "kBig": 2**40, "elem_t": "float"}, "cpu").text
    lines = text.splitlines()
    assert lines[0].startswith("// kernel=copy_plain sources=")
    assert lines[1] == "#define CUEP_JIT 1"
    for line in ("kNumRanks = 4;", "kHidden = 64;", "bool kOn = true;", f"long long kBig = {2**40};"):
        assert any(found.endswith(line) and "constexpr" in found for found in lines), line
    assert "using elem_t = float;" in lines
    assert lines.index('#include "copy_plain.cu"') > lines.index("[[maybe_unused]] constexpr int kNumThreads = 64;")
    assert lines[-1] == "CUEP_CPU_EXPORT(copy_plain)"
    gpu = unit("sm_90").text
    assert "constexpr int kNumThreads = 512;" in gpu
    assert "CUEP_CPU_EXPORT" not in gpu


def test_wrong_names_are_refused() -> None:
    with pytest.raises(CompileError, match="copy_plain"):
        jit.render("copy_plane", CONSTANTS, "cpu")
    with pytest.raises(ArgumentError, match=r"no tunable kThreads.*kNumThreads"):
        jit.render("copy_plain", CONSTANTS, "cpu", {"kThreads": 1})
    with pytest.raises(ArgumentError, match="kNumThreads is a tunable"):
        jit.render("copy_plain", {**CONSTANTS, "kNumThreads": 1}, "cpu")


def test_what_makes_a_new_unit(folders: Path) -> None:
    """F04: constant, tunable, target, kernel or (nested) header; nothing else."""
    (folders / "include/cuep/extra.cuh").write_text('#include "deep.cuh"\n')
    (folders / "include/cuep/deep.cuh").write_text("constexpr int kExtra = 1;\n")
    first = unit().digest
    assert unit().digest == first
    assert unit(kHidden=65).digest != first
    assert unit("sm_90").digest != unit("sm_80").digest != first
    assert jit.render("copy_plain", CONSTANTS, "cpu", {"kNumThreads": 32}).digest != first
    (folders / "include/cuep/unrelated.cuh").write_text("// never included\n")
    assert unit().digest == first
    (folders / "include/cuep/deep.cuh").write_text("constexpr int kExtra = 2;\n")
    assert unit().digest != first


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_errors_name_the_real_line(folders: Path, target: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("gcc" if target == "cpu" else "nvrtc")
    (folders / "include/cuep/extra.cuh").write_text("#pragma once\n\nconstexpr int kExtra = missing_thing;\n")
    with pytest.raises(CompileError) as caught:
        jit.build(unit(target))
    text = str(caught.value)
    assert "missing_thing" in text
    assert "extra.cuh:3" in text.replace("(3)", ":3")
    assert str(folders) in text
    assert jit.stats.compiled == 0


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_layout_drift_is_a_compile_error(
    monkeypatch: pytest.MonkeyPatch, target: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("gcc" if target == "cpu" else "nvrtc")
    good = unit(target)
    bad = good.text.replace("OFFSETOF(scale) == 32", "OFFSETOF(scale) == 40")
    assert bad != good.text
    with pytest.raises(CompileError, match="Params::scale"):
        jit.build(jit.Unit(good.name, target, bad, good.layout, "digest", False))


def test_ranks_compile_once(gcc: None) -> None:
    paths = on_threads(4, lambda comm: jit.build_shared(unit(), comm))
    assert len(set(paths)) == 1
    assert call(paths[0]) == 6404
    assert (jit.stats.compiled, jit.stats.hits) == (1, 3)


def test_ranks_share_the_error(gcc: None, folders: Path) -> None:
    (folders / "include/cuep/extra.cuh").write_text("constexpr int kExtra = missing_thing;\n")
    errors = on_threads(3, lambda comm: jit.build_shared(unit(), comm))
    assert {type(error) for error in errors} == {CompileError}
    assert len({str(error) for error in errors}) == 1


def test_rank_that_cannot_see_the_file_builds_itself(gcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "is_intact", lambda path: False)
    monkeypatch.setattr(cache, "find", lambda *entry: None)
    paths = on_threads(2, lambda comm: jit.build_shared(unit(), comm))
    assert [call(path) for path in paths] == [6404, 6404]
    assert jit.stats.compiled == 2


def test_one_rank_alone_fails(gcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that has another unit fails to build it: every rank gets that error."""

    def work(comm: ThreadComm) -> Path:
        mine = unit()
        if comm.rank == 1:
            mine = jit.Unit(mine.name, "cpu", "#error only here\n", mine.layout, "other", False)
        return jit.build_shared(mine, comm)

    errors = on_threads(2, work)
    assert all(isinstance(error, CompileError) and "only here" in str(error) for error in errors)


def test_errors_survive_the_trip_between_ranks() -> None:
    import pickle

    for kind in (CompileError, BackendUnavailable, ArgumentError):
        error = pickle.loads(pickle.dumps(kind("text")))
        assert isinstance(error, CuepError)
        assert str(error) == "text"
