#!/usr/bin/env bash
# From a model's weights to the report of the paper's tables: answers, a drafter for every row, measurements.
#   scripts/paper.sh TARGET PROMPTS OUT [FLAG of `secondguess reproduce`]...
# PROMPTS is what `secondguess prepare` reads. An interrupted run goes on when the command is given again.
# DEVICE (default: cuda) and DTYPE (default: bfloat16) are the target's. TRAIN="torchrun --nproc-per-node 8 -m secondguess train"
# trains on several GPUs. DRY_RUN=1 prints the commands instead of running them.
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: $0 TARGET PROMPTS OUT [FLAG of secondguess reproduce]..." >&2; exit 2; }

target=$1 prompts=$2 out=$3
shift 3
where=(--device "${DEVICE:-cuda}" --dtype "${DTYPE:-bfloat16}")
read -ra train <<<"${TRAIN:-secondguess train}"
config=$(cd "$(dirname "$0")/.." && pwd)/configs/paper.yaml
look=(carry=half shared_loss=both lens=false) # the paper's second look; the defaults are ours
balance=(balance=floor balance_weight=0.1)    # the paper states neither its form nor its weight
arms=()

run() {
    if [ -n "${DRY_RUN:-}" ]; then printf '%q ' "$@"; echo; else "$@"; fi
}

arm() { # NAME of `secondguess reproduce --arm`, then its settings
    local name=$1
    shift
    run "${train[@]}" --config "$config" target="$target" responses="$out/answers.jsonl" out="$out/$name" "$@"
    arms+=(--arm "$name=$out/$name/drafter")
}

run mkdir -p "$out"
run secondguess prepare "$target" "$prompts" --out "$out/answers.jsonl" --leave-out-overlap "${where[@]}"
arm eagle3.1 method=eagle3.1
arm pr method=pr "${look[@]}" "${balance[@]}"
arm no-balance method=pr "${look[@]}" balance_weight=0
arm no-self-query method=pr "${look[@]}" "${balance[@]}" query_slot=own_token
arm two-layer method=eagle3.1 num_layers=2
arm hass method=hass
arm hass+pr method=hass+pr "${look[@]}" "${balance[@]}"
run secondguess reproduce all "$target" "${arms[@]}" --out "$out/report" "${where[@]}" "$@"
