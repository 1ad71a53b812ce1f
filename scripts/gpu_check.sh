#!/usr/bin/env bash
# Tests, compute-sanitizer and benchmarks on the GPUs of this machine, with the current python3 and MPI: no network, no
# virtual environment, nothing installed. Writes DIR/results.json and DIR/log.txt; non-zero exit if anything failed.
#
#   scripts/gpu_check.sh [--quick] [--out DIR]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec python3 "$root/scripts/gpu_check.py" "$@"
