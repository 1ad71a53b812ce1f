"""The work of gpu_check.sh: runs each stage as a program of its own with a time limit, and gathers what they report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuep import mpiexec
from cuep.tables import print_table

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "timeout_method=thread"]
FULL_SECONDS, QUICK_SECONDS = 470, 170  # under 8 and 3 minutes, with room to end the last stage
COPIES = "dispatch=copy+combine=copy"  # the variants whose rows copy engines move
# as scripts/forms.py names them; all of a mode in one process
BENCHED = {
    "ll": (
        *("ll:tokens=1", "ll:tokens=8", "ll:tokens=64", "ll:tokens=128"),
        *("ll:tokens=128:layout=rank_major", "ll:tokens=128:layout=rank_major:quant=fp8_block128"),
        *("ll:tokens=128:reduce=per_rank", "ll:tokens=128:reduce=per_rank:quant=fp8_block128:staged=1"),
        *("ll:tokens=128:layout=rank_major:in_place=1", "ll:tokens=128:combine_quant=fp8_block128", "ll:tokens=512"),
    ),
    "ht": (
        f"ht:tokens=4096:floor=1:variants=default/{COPIES}",
        "ht:tokens=4096:layout=expert_major:alignment=128",
        "ht:tokens=4096:quant=fp8_block128",
        *(f"ht:tokens=4096:variants=combine=pull:combine_buffer=1{few}" for few in (":num_sms=8", "")),
    ),
}
QUICK_BENCHED = {"ll": ("ll:tokens=1", "ll:tokens=128"), "ht": ("ht:tokens=4096:floor=1",)}
QUICK_SANITIZER = (("memcheck", "ll"), ("synccheck", "ht"))  # memcheck takes half a minute
SANITIZED = {
    "ll": (
        *("ll", "ll:layout=rank_major", "ll:reduce=per_rank"),
        "ll:layout=rank_major:quant=fp8_block128:in_place=1",
        "ll:reduce=per_rank:quant=fp8_block128:combine_quant=logfmt10",
    ),
    "ht": (
        "ht:num_sms=8",
        "ht:layout=expert_major:alignment=4:zero_padding=1",
        "ht:with_out=1",
        *(f"ht:variants={COPIES}", "ht:variants=combine=pull:combine_buffer=1:num_sms=8"),
        "ht:quant=fp8_block128",
    ),
}
# It is the slowest of the tools, and knows barriers alone: what warps tell each other by release and acquire in shared
# memory (the tell warp of ht combines, with few blocks or expert-major) it takes for races.
RACECHECKED = {"ll": SANITIZED["ll"][:2], "ht": ("ht",)}
# Kernels of many shapes take their time to compile: these files run on two ranks only, the others on the most.
CASE_TESTS = ("tests/mpi/test_cases.py", "tests/mpi/test_quant.py", "tests/mpi/test_forward.py")
FORM_TESTS = (
    *("tests/mpi/test_ll_forms.py", "tests/mpi/test_ht_forms.py"),
    *("tests/mpi/test_combine_quant.py", "tests/mpi/test_ht_quant.py"),
)
SLOW_TESTS = ("tests/mpi/test_train_moe.py",)  # CuPy compiles a kernel for each of its many expressions
LAST_TESTS = ("tests/mpi/test_cycles.py", "tests/mpi/test_demo_and_bench.py")  # each takes many seconds
FEW_TESTS = (
    "tests/mpi/test_steps.py",
    "tests/mpi/test_refusals.py",
    "tests/mpi/test_staged.py",
    "tests/mpi/test_gpu.py",
)
JOB_TESTS = ("tests/test_jobs.py", "tests/test_death.py", "tests/test_mask.py")  # they start their ranks themselves
SOME_JOBS = (
    "sys or (for_longer and ll) or (a_killed_rank and (ht-dispatch or lines-dispatch))"
    " or (only_stopped and flags-False)"
)


@dataclass
class Stage:
    """One program that ran: what it was and how it ended."""

    name: str
    command: str
    is_ok: bool = False
    seconds: float = 0.0
    status: int | None = None
    note: str = ""


@dataclass
class Results:
    """What results.json holds."""

    ok: bool = False
    quick: bool = False
    gpus: int = 0
    versions: dict[str, Any] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    startup: list[dict[str, Any]] = field(default_factory=list)
    tests: list[dict[str, Any]] = field(default_factory=list)
    sanitizer: list[dict[str, Any]] = field(default_factory=list)
    bench: list[dict[str, Any]] = field(default_factory=list)


class Runner:
    """Runs stages until the time is up; their output goes to the log."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out = out
        self.results = Results()
        self._end = time.monotonic() + seconds
        self._log = (out / "log.txt").open("w")
        self._lock = threading.Lock()
        self._env = os.environ | {"CUEP_BACKEND": "cuda", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, name: str, command: list[str], limit_s: float, **env: str) -> tuple[Stage, str]:
        """Run one stage; returns it and what it printed."""
        stage = Stage(name, " ".join(command))
        self.results.stages.append(stage)
        limit_s = min(limit_s, self._end - time.monotonic())
        if limit_s < 2:
            stage.note = "not run: out of time"
            return self._finish(stage, "")
        start = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=self._env | env, text=True, errors="replace", stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            stage.note = f"ended after its limit of {limit_s:.0f} s"
            printed = _end_group(process)
        stage.seconds = round(time.monotonic() - start, 1)
        stage.status = process.returncode
        stage.is_ok = process.returncode == 0 and not stage.note
        return self._finish(stage, printed)

    def ranks(self, name: str, num_ranks: int, command: list[str], limit_s: float, **env: str) -> tuple[Stage, str]:
        return self.run(name, [*mpiexec.command(), "-n", str(num_ranks), *command], limit_s, **env)

    def save(self) -> None:
        with self._lock:
            self._save()

    def _save(self) -> None:
        self.results.ok = bool(self.results.stages) and all(stage.is_ok for stage in self.results.stages)
        (self.out / "results.json").write_text(json.dumps(asdict(self.results), indent=1) + "\n")

    def _finish(self, stage: Stage, printed: str) -> tuple[Stage, str]:
        state = "ok" if stage.is_ok else "FAILED"
        line = f"{state:<7} {stage.name:<24} {stage.seconds:6.1f} s  {stage.note}".rstrip()
        with self._lock:  # some stages run beside others
            self._log.write(f"\n==== {stage.name}: {stage.command}\n{printed}==== {line}\n")
            self._log.flush()
            print(line, flush=True)
        self.save()  # whatever happens to this script, what it knows so far is there
        return stage, printed


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: fewer shapes and sanitizer runs")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu_check_out", metavar="DIR")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    runner = Runner(out, QUICK_SECONDS if options.quick else FULL_SECONDS)
    runner.results.quick = options.quick

    count_gpus = "import cupy; print('gpus', cupy.cuda.runtime.getDeviceCount())"
    _, printed = runner.run("count GPUs", [sys.executable, "-c", count_gpus], 60)
    found = re.search(r"gpus (\d+)", printed)
    num_gpus = int(found[1]) if found else 0
    runner.results.gpus = num_gpus
    if num_gpus:
        check(runner, num_gpus, options.quick)
    else:
        print("no GPU can be used:\n" + printed)
    runner.save()
    show(runner.results, out)
    return 0 if runner.results.ok else 1


def check(runner: Runner, num_gpus: int, quick: bool) -> None:
    """All stages: what is short and tells most comes first."""
    most = max(n for n in (1, 2, 4) if n <= num_gpus)
    info = runner.out / "info.json"
    stage, _ = runner.run("info", [sys.executable, "-m", "cuep", "info", "--json", str(info)], 60)
    if stage.is_ok:
        runner.results.versions = json.loads(info.read_text())

    run_startup(runner, most)
    for mode, forms in (QUICK_BENCHED if quick else BENCHED).items():
        run_bench(runner, most, mode, forms)

    sanitizer = find_sanitizer()
    if quick:
        run_tests(runner, most, 60, FEW_TESTS)
        for tool, mode in () if sanitizer is None else QUICK_SANITIZER:
            run_sanitizer(runner, str(sanitizer), tool, mode, min(2, num_gpus))
    else:
        files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/mpi").glob("test_*.py"))]
        files = list(FEW_TESTS) + [name for name in files if name not in FEW_TESTS + LAST_TESTS] + list(LAST_TESTS)
        run_tests(
            runner,
            most,
            70,
            [name for name in files if name not in CASE_TESTS + FORM_TESTS + SLOW_TESTS],
            has_large=True,
        )
        if num_gpus < 8:
            # More ranks than GPUs is slow and says nothing about speed, but 8 ranks reach what 4 do not.
            run_tests(runner, 8, 15, ["tests/mpi"])
        run_on_pairs(runner, num_gpus, sanitizer)
    if sanitizer is None:
        print("compute-sanitizer was not found: not run")
        runner.results.sanitizer.append({"tool": None, "note": "compute-sanitizer was not found"})
    if not quick:
        run_job_tests(runner, num_gpus, limit_s=90)


def run_on_pairs(runner: Runner, num_gpus: int, sanitizer: Path | None) -> None:
    """What needs two GPUs at most: on four, two such lines of stages run beside one another."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(num_gpus)]
    size = min(2, num_gpus)

    def line(mode: str, pair: list[str]) -> None:
        visible = ",".join(pair)
        if mode == "ll":
            run_tests(runner, size, 40, CASE_TESTS, name="cases", visible=visible)
            run_tests(runner, 1, 8, FEW_TESTS, visible=visible)
        else:
            run_tests(runner, size, 50, FORM_TESTS, name="forms", visible=visible)
        for tool in () if sanitizer is None else ("memcheck", "synccheck", "racecheck"):
            run_sanitizer(runner, str(sanitizer), tool, mode, size, visible=visible)

    if num_gpus < 4:
        line("ll", gpus[:size])
        line("ht", gpus[:size])
        return
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(line, "ll", gpus[:2]), pool.submit(line, "ht", gpus[2:4])]:
            future.result()


def run_startup(runner: Runner, num_ranks: int) -> None:
    """Import, start and first use: with an empty cache, then with a warm one."""
    cache = runner.out / "startup_cache"
    shutil.rmtree(cache, ignore_errors=True)
    for kind in ("cold", "warm"):
        command = [sys.executable, str(ROOT / "scripts/startup.py")]
        _, printed = runner.ranks(f"startup, {kind} cache", num_ranks, command, 60, CUEP_CACHE_DIR=str(cache))
        found = re.search(r"^startup (\{.*\})$", printed, re.MULTILINE)
        if found:
            runner.results.startup.append({"cache": kind, "ranks": num_ranks} | json.loads(found[1]))
    shutil.rmtree(cache, ignore_errors=True)
    runner.save()


def run_tests(
    runner: Runner,
    num_ranks: int,
    seconds: float,
    files: Sequence[str],
    *,
    has_large: bool = False,
    name: str = "",
    visible: str | None = None,
) -> None:
    """The first form of every test, then as many of the others as fit into so many seconds. has_large: also what takes
    many seconds or GB. visible: CUDA_VISIBLE_DEVICES."""
    report = runner.out / f"tests_{num_ranks}{name}.xml"
    report.unlink(missing_ok=True)
    command = [*PYTEST, *files, f"--junitxml={report}", *([] if has_large else ["-m", "not large"])]
    title = f"tests, {num_ranks} ranks" + (f", {name}" if name else "")
    seconds *= 1.0 if runner.results.gpus >= 4 else 0.6  # lines of stages run beside one another, or in turn
    env = {"CUEP_TEST_SECONDS": str(seconds)} | _seeing(visible)
    stage, _ = runner.ranks(title, num_ranks, command, seconds + 45, **env)
    if stage.status == 5 and not stage.note:
        stage.is_ok, stage.note = True, "no test for this number of ranks"
    add_report(runner, report, num_ranks)


def run_job_tests(runner: Runner, num_gpus: int, limit_s: float) -> None:
    """How jobs end, and what survivors of a rank say and do."""
    num_ranks = 4 if num_gpus == 2 else 3  # NVSHMEM wants as many ranks on each GPU
    report = runner.out / "tests_jobs.xml"
    report.unlink(missing_ok=True)
    files = [name for name in JOB_TESTS if (ROOT / name).is_file()]
    runner.run(
        "tests of jobs", [*PYTEST, *files, "-k", SOME_JOBS, f"--junitxml={report}"], limit_s,
        CUEP_TEST_JOB_RANKS=str(num_ranks),
    )  # fmt: skip
    add_report(runner, report, "jobs of several")


def add_report(runner: Runner, report: Path, ranks: int | str) -> None:
    summary: dict[str, Any] = {"ranks": ranks, "passed": 0, "failed": 0, "skipped": 0, "out_of_time": 0, "failures": []}
    if report.is_file():
        for case in ET.parse(report).iter("testcase"):
            bad = [*case.iter("failure"), *case.iter("error")]
            skipped = case.find("skipped")
            outcome = "failed" if bad else "passed" if skipped is None else "skipped"
            if not bad and skipped is not None and skipped.get("message") == "out of time":
                outcome = "out_of_time"
            summary[outcome] += 1
            for node in bad:
                text = (node.text or node.get("message") or "")[:4000]
                summary["failures"].append({"test": f"{case.get('classname')}::{case.get('name')}", "text": text})
    summary["complete"] = report.is_file()
    runner.results.tests.append(summary)
    runner.save()


def run_bench(runner: Runner, num_ranks: int, mode: str, forms: Sequence[str]) -> None:
    records = runner.out / f"bench_{mode}.json"
    records.unlink(missing_ok=True)
    command = [sys.executable, "-m", "mpi4py", str(ROOT / "scripts/forms.py"), "--json", str(records), *forms]
    runner.ranks(f"bench {mode}", num_ranks, command, 150)
    if records.is_file():
        runner.results.bench += json.loads(records.read_text())
    runner.save()


def _seeing(visible: str | None) -> dict[str, str]:
    return {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}


def run_sanitizer(
    runner: Runner, sanitizer: str, tool: str, mode: str, num_ranks: int, visible: str | None = None
) -> None:
    forms = RACECHECKED[mode] if tool == "racecheck" else SANITIZED[mode]
    # Calls that return an error are no finding: NVSHMEM and CuPy probe for what they can do.
    watched = [sanitizer, "--tool", tool, "--target-processes", "application-only", "--error-exitcode", "9"]
    watched += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [*watched, sys.executable, "-m", "mpi4py", str(ROOT / "scripts/forms.py"), *forms]
    # Kernels run many times slower, and peers must not give up on each other.
    env = {"CUEP_TIMEOUT_S": "55", "NVSHMEM_DISABLE_NCCL": "1"} | _seeing(visible)
    stage, printed = runner.ranks(f"{tool} {mode}", num_ranks, command, 90, **env)
    errors = [int(number) for number in re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", printed)]
    if len(errors) < num_ranks and stage.is_ok:
        stage.is_ok, stage.note = False, "not every rank printed a summary"
    record = {"tool": tool, "mode": mode, "forms": forms, "ranks": num_ranks, "ok": stage.is_ok, "errors": sum(errors)}
    runner.results.sanitizer.append(record)
    runner.save()


def find_sanitizer() -> Path | None:
    found = shutil.which("compute-sanitizer")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [Path(found)] if found else [Path(home) / "bin/compute-sanitizer" for home in homes if home]
    return next((path for path in candidates if path.is_file()), None)


def show(results: Results, out: Path) -> None:
    for tests in results.tests:
        for failure in tests["failures"]:
            print(f"FAILED on {tests['ranks']} ranks: {failure['test']}")
    rows: list[list[Any]] = [["tests", f"{t['ranks']} ranks", _test_text(t)] for t in results.tests]
    rows += [["startup", f"{s['cache']} cache, {s['ranks']} ranks", _startup_text(s)] for s in results.startup]
    rows += [
        ["sanitizer", f"{s['tool']} {s['mode']}, {s['ranks']} ranks", "clean" if s["ok"] else f"{s['errors']} errors"]
        for s in results.sanitizer
        if s["tool"]
    ]
    for record in results.bench:
        what = f"{_form_text(record)} {record['op']}, {record['tokens']} tokens, {record['ranks']} ranks"
        checked = "" if record["checked"] else "  NOT RIGHT"
        rows.append(["bench", what, f"{record['us_median']:.1f} us  {record['gb_per_s']} GB/s{checked}"])
    print_table("gpu_check", ["", "what", "result"], rows)
    bad = [stage.name for stage in results.stages if not stage.is_ok]
    print(f"gpu_check: {'ok' if results.ok else 'FAILED: ' + ', '.join(bad)}  ({out}/results.json, log.txt)")


def _form_text(record: dict[str, Any]) -> str:
    """What the record is of, in the words of the settings that are not cuep's defaults."""
    named = [str(record[name]) for name in ("mode", "layout", "reduce", "quant") if record[name]]
    named += [f"{name}={record[name]}" for name in ("combine_quant", "in_place", "num_sms") if record[name]]
    named += [f"({record[name]})" for name in ("peer", "variant") if record[name] not in (None, "default")]
    return " ".join(named)


def _startup_text(startup: dict[str, Any]) -> str:
    return (
        f"import {startup['import_s']:.2f} s, first use {startup['first_use_s']:.2f} s"
        f" beyond NVSHMEM's {startup['nvshmem_s']:.2f} s"
    )


def _test_text(tests: dict[str, Any]) -> str:
    counts = f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
    counts += f", {tests['out_of_time']} further forms not run for lack of time" if tests["out_of_time"] else ""
    return counts if tests["complete"] else "did not finish: see the log"


def _end_group(process: subprocess.Popen[str]) -> str:
    """End a launcher and its ranks: politely, so that it can end ranks that left its process group, then by force."""
    for number, patience_s in ((signal.SIGTERM, 8), (signal.SIGKILL, 8)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=patience_s)[0]
    return "the stage left processes behind that hold its output\n"


if __name__ == "__main__":
    sys.exit(main())
