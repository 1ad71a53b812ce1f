# Shared by demo.sh, test.sh and .ci/run: a virtual environment with what they need, and a launcher. To be sourced.
# shellcheck shell=bash
#
# PYTHON   the Python to make .venv with (default: the first of python3, python3.13 ... python3.10 that is new enough)
# MPIEXEC  a site's own MPI launcher, with its options; pip's mpich is then not installed

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv

die() {
    echo "error: $*" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        if is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.10 or newer is needed and none was found (Debian, Ubuntu: apt-get install python3 python3-venv)." \
        "PYTHON=/path/to/python3 names another one."
}

# make_venv DIR: a virtual environment, made if it is not there or its Python is gone.
make_venv() {
    local python log
    is_new_enough "$1/bin/python" && "$1/bin/python" -m pip --version >/dev/null 2>&1 && return
    python=$(find_python) || exit 1
    echo "making $1 with $python"
    if ! log=$("$python" -m venv --clear "$1" 2>&1); then
        echo "$log" >&2
        die "no virtual environment could be made with $python (Debian, Ubuntu: apt-get install python3-venv)"
    fi
}

# install_cuep DIR EXTRAS: cuep, editable, with these extras; once for each pyproject.toml, place and set of extras.
install_cuep() {
    local stamp
    stamp=$1/.cuep-$( (echo "$ROOT $2" && cat "$ROOT/pyproject.toml") | cksum | tr ' ' -)
    [ -e "$stamp" ] && return
    echo "installing cuep[$2] into $1 (first run only)"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check -e "$ROOT[$2]" ||
        die "pip could not install cuep[$2]; its message is above"
    touch "$stamp"
}

# gpu_extra: the extra for this machine's GPUs, nothing where there is none that can be used.
gpu_extra() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d . -f 1) || true
    case $driver in
    '' | *[!0-9]*) return ;;
    esac
    # the oldest driver branches of CUDA 13 and 12
    if [ "$driver" -ge 580 ]; then
        echo cuda13
    elif [ "$driver" -ge 525 ]; then
        echo cuda12
    else
        echo "GPU driver $driver is older than 525, which CUDA 12 needs: the CPU backend is used" >&2
    fi
}

need_cxx() {
    local candidate
    for candidate in ${CUEP_CXX:-${CXX:-g++ c++ clang++}}; do
        command -v "$candidate" >/dev/null && return
    done
    die "the CPU backend compiles its kernels with a C++17 compiler and none was found" \
        "(Debian, Ubuntu: apt-get install g++). CUEP_CXX=/path/to/g++ names another one."
}

# prepare EXTRAS: .venv with cuep, an MPI, and the CUDA packages where there is a GPU. Sets GPU to their extra or "".
prepare() {
    GPU=$(gpu_extra)
    [ -n "$GPU" ] || need_cxx
    make_venv "$VENV"
    local mpi=,mpich
    [ -z "${MPIEXEC:-}" ] || mpi=
    install_cuep "$VENV" "$1$mpi${GPU:+,$GPU}"
    PATH=$VENV/bin:$PATH
    # 4 ranks share the cores: threads of a linear-algebra library would only wait for each other.
    export PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
}

# ranks N COMMAND...: run a command on N ranks.
ranks() {
    local count=$1
    shift
    # shellcheck disable=SC2046  # the launcher's options are words
    $(launcher) -n "$count" "$@"
}

launcher() {
    if [ -n "${MPIEXEC:-}" ]; then
        echo "$MPIEXEC"
    else
        python -c 'from cuep import mpiexec; print(*mpiexec.command())'
    fi
}
