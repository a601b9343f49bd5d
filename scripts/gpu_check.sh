#!/bin/sh
# What this machine's GPU does with this checkout: equality tests, costs of cycles at the shapes of Llama-3.1-8B and
# Qwen3-8B with random weights (the paper's Tables 9 and 2), and the share of the memory's speed that they reach. Under
# eight minutes, no network, nothing but torch, transformers and safetensors. Without a GPU the same at tiny shapes.
# usage: scripts/gpu_check.sh [FOLDER]   (default: runs/gpu-check; PYTHON names an interpreter)
set -eu
. "$(dirname "$0")/bare_python.sh"

exec "$PYTHON" -m secondguess.bench.gpu --out "${1:-runs/gpu-check}"
