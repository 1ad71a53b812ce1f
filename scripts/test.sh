#!/usr/bin/env bash
# Runs all tests: those of one process, then those of 1, 2, 4 and 8 MPI ranks (8: only tests that ask for 8).
# Needs Python 3.10 or newer and g++; everything else goes into .venv. Arguments are passed to every pytest.
#
#   scripts/test.sh [-k EXPRESSION] [-x] ...          RANKS="2 4" scripts/test.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare test
cd "$ROOT"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0 failed=0 skipped=0

count() {
    # the last line that pytest closes with, such as "== 2 failed, 4 passed, 1 skipped, 2 errors in 0.12s =="
    (grep -E ' in [0-9.]+s' "$log" | tail -n 1 | grep -oE "[0-9]+ $1" | cut -d ' ' -f 1) || echo 0
}

# stage TITLE SECONDS COMMAND...: one pytest run, added to the total. 5 = it had no test to run.
stage() {
    local title=$1 limit=$2 status=0 bad
    shift 2
    echo "==== $title"
    timeout --kill-after=20 "$limit" "$@" 2>&1 | tee "$log" || status=${PIPESTATUS[0]}
    bad=$(($(count failed) + $(count error)))
    if [ "$bad" -eq 0 ] && [ "$status" -ne 0 ] && [ "$status" -ne 5 ]; then
        echo "==== $title ended with status $status"
        bad=1
    fi
    passed=$((passed + $(count passed))) failed=$((failed + bad)) skipped=$((skipped + $(count skipped)))
}

stage "one process" 900 python -m pytest --color=no tests --ignore tests/mpi "$@"
for n in ${RANKS:-1 2 4 8}; do
    # shellcheck disable=SC2046  # the launcher's options are words
    stage "$n MPI ranks" 1200 $(launcher) -n "$n" python -m pytest --color=no tests/mpi "$@"
done

echo "total: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
