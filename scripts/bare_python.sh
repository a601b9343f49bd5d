# Sourced by scripts that run from a bare checkout, with an interpreter (PYTHON) that has torch, transformers and
# safetensors: it finds the package there and, as if it were installed, its version.
root=$(cd "$(dirname "$0")/.." && pwd)
bare=${TMPDIR:-/tmp}/secondguess-bare
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")
mkdir -p "$bare/secondguess-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: secondguess\nVersion: %s\n' "$version" > "$bare/secondguess-$version.dist-info/METADATA"
export PYTHONPATH="$root/src:$bare${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
