#!/usr/bin/env bash
# Make the virtual environment $VENV (.venv) with $PYTHON (python3) and install kdabench into it, for development.
# Does nothing if pyproject.toml, the interpreter, the place of this checkout and the machine's GPU are as they were.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=${VENV:-.venv}
fail() { echo "setup: $*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "no interpreter $python; install Python 3.11 to 3.13, or: make setup PYTHON=/path/to/python3"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$python does not start"
case $version in
    3.11 | 3.12 | 3.13) ;;
    *) fail "$python is Python $version, kdabench needs 3.11 to 3.13; try: make setup PYTHON=python3.11" ;;
esac
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module; on Debian or Ubuntu: apt install python$version-venv"

gpu=none
if [[ -e /dev/nvidia0 ]] || command -v nvidia-smi >/dev/null; then gpu=nvidia; fi

stamp=$venv/setup-stamp
wanted="$(cksum pyproject.toml scripts/setup.sh) python$version gpu=$gpu $PWD"
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && "$venv/bin/python" -c '' 2>/dev/null; then exit 0; fi

echo "setup: Python $version, GPU: $gpu, into $venv"
rm -f "$stamp"
"$venv/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

if [[ $gpu == none ]]; then
    # Pinned, so that a package index with CPU builds (set by pip's own configuration) is asked for exactly this one.
    pip install torch==2.13.0
fi
pip install -e '.[suite,test]'
if [[ $gpu == nvidia && $("$venv/bin/python" -c 'import torch; print(torch.version.cuda or "")') == 13.* ]]; then
    dsl=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("nvidia-cutlass-dsl"))')
    pip install "nvidia-cutlass-dsl[cu13]==$dsl"
fi
printf '%s' "$wanted" >"$stamp"
