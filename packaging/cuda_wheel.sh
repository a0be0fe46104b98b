#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests the plugin with the real vLLM for CUDA on a machine that needs no GPU.
#
#   packaging/cuda_wheel.sh [VENV]    default VENV: .venv-cuda; PYTHON names the interpreter
#
# Installs several GB. The driver's library, which vLLM is linked with, is replaced by a
# stub that knows no device, and the tests pretend a GPU of each compute capability.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${1:-.venv-cuda}
VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0
NEEDED_GIB=14

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
die() { printf '\ntest-cuda-wheel stopped: %s\n' "$*" >&2; exit 1; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
has() {
    "$VENV/bin/python" -c "
from importlib.metadata import version
import sys
sys.exit(version('$1') != '$2')" 2>/dev/null
}

[ "$(uname -sm)" = "Linux x86_64" ] || die "vLLM's CUDA build is for Linux on x86_64."
command -v "${CC:-gcc}" >/dev/null || die "the C compiler '${CC:-gcc}' was not found."
if [ ! -x "$VENV/bin/python" ]; then
    say "creating $VENV"
    "${PYTHON:-python3}" -m venv "$VENV" || die "'${PYTHON:-python3} -m venv' failed."
fi
if ! has vllm "$VLLM_VERSION" || ! has torch "$TORCH_VERSION"; then
    free_gib=$(($(df -Pm "$VENV" | awk 'NR == 2 {print $4}') / 1024))
    [ "$free_gib" -ge "$NEEDED_GIB" ] ||
        die "vLLM and torch for CUDA need $NEEDED_GIB GiB; $free_gib are free."
    say "installing vLLM $VLLM_VERSION and torch $TORCH_VERSION for CUDA (minutes, 9 GB)"
    # Three equal signs: a CPU build of the same version would do for two.
    pip install "torch===$TORCH_VERSION" "vllm===$VLLM_VERSION"
fi
say "installing polykv-vllm (editable) and what its tests need"
pip install "setuptools>=77,<81" pytest pytest-timeout hypothesis
pip install --no-build-isolation --editable .
mkdir -p "$VENV/stub"
"${CC:-gcc}" -shared -fPIC -o "$VENV/stub/libcuda.so.1" packaging/cuda_driver_stub.c
say "testing"
export LD_LIBRARY_PATH="$PWD/$VENV/stub${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
case $VENV in /*) LD_LIBRARY_PATH="$VENV/stub:$LD_LIBRARY_PATH" ;; esac
exec "$VENV/bin/python" -m pytest -p no:cacheprovider tests/cuda_wheel
