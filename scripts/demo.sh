#!/usr/bin/env bash
# Runs a mixture-of-experts layer on a text over 4 MPI ranks: on GPUs where nvidia-smi finds some, else on the CPU.
# Needs Python 3.10 or newer and, on the CPU, g++; everything else goes into .venv. Arguments are those of `cuep demo`.
#
#   scripts/demo.sh [--text FILE] [--tokens N]        RANKS=2 scripts/demo.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare cli
ranks "${RANKS:-4}" python -m mpi4py -m cuep demo "$@"
