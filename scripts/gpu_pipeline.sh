#!/bin/sh
# From prompts to drafters that are measured, on a machine with a GPU, a checkout, and what is carried there: the target
# answers the prompts, EAGLE-3.1 and PR drafters are trained on that, both are replayed over tasks. Made for machines
# that are lent for minutes and take little at a time: call it again, and it goes on from where it was, with what came in
# more pieces meanwhile. What it has so far is in OUT at the end of every call, in few and small files.
#
# usage: scripts/gpu_pipeline.sh CARRIED OUT [SECONDS]     (of this call; default: 540)
#
# CARRIED: target.gguf, or its pieces target.gguf.part-* (split -b 45m) with target.gguf.sha256, in one call or several;
#          prompts/*.jsonl to answer; tasks/*.jsonl to measure on; wheels/*.whl of packages that are missing there (gguf)
# also:    TARGET (a folder or file in place of target.gguf), PYTHON, STATE (what calls share; default: ~/.cache), and
#          LIMIT (prompts), NEW_TOKENS (per answer), BATCH (answers at once), TRAIN (key=value ... for both drafters)
set -eu
. "$(dirname "$0")/bare_python.sh"

carried=$1 out=$2 seconds=${3:-540}
end=$(($(date +%s) + seconds))
state=${STATE:-$HOME/.cache/secondguess/gpu-pipeline}
target=${TARGET:-$state/target.gguf}
least=15 # seconds that a step must have to begin
mkdir -p "$state" "$out"
: >> "$state/progress.txt"

say() { echo "pipeline: $*" | tee -a "$state/progress.txt"; }
left() { echo $((end - $(date +%s))); }

hand_over() {
    cp "$state/progress.txt" "$out/"
    for method in eagle3.1 pr; do
        weights=$state/$method/drafter/model.safetensors
        [ ! -f "$weights" ] || cp "$weights" "$out/$method.safetensors"
    done
    [ ! -f "$state/answers.safetensors" ] || cp "$state/answers.safetensors" "$out/"
    (cd "$state" && find . -name '*.json' -o -path './*/log.jsonl' -o -name 'run.yaml' -o -name 'query.safetensors' |
        grep -v -e '^./captures' -e '^./site' | tar czf - -T -) > "$out/results.tar.gz" || true
}
trap hand_over EXIT

# step NAME SECONDS COMMAND...: done once, in as many calls as it takes, each for so many seconds at most.
step() {
    name=$1 most=$2
    shift 2
    [ ! -e "$state/$name.done" ] || return 0
    now=$(left)
    [ "$now" -gt "$least" ] || { say "$name: no time left in this call"; exit 0; }
    [ "$most" -lt "$now" ] || most=$now
    began=$(date +%s)
    code=0
    timeout -s INT -k 20 "$most" "$@" || code=$?
    case $code in
    0) : > "$state/$name.done" ;;
    124 | 130) ;;
    *) say "$name: failed with exit code $code"; exit "$code" ;;
    esac
    say "$name: $(($(date +%s) - began)) s$([ -e "$state/$name.done" ] || echo ', unfinished')"
}

gather_target() {
    [ -z "${TARGET:-}" ] && [ ! -f "$target" ] || return 0
    for piece in "$carried"/target.gguf "$carried"/target.gguf.part-* "$carried"/target.gguf.sha256; do
        [ ! -f "$piece" ] || cp "$piece" "$state/"
    done
    if [ ! -f "$target" ]; then
        cat "$state"/target.gguf.part-* > "$state/joined"
        echo "$(cut -d ' ' -f 1 "$state/target.gguf.sha256")  $state/joined" | sha256sum --check --quiet 2>/dev/null ||
            { say "the target has come in part: $(wc -c < "$state/joined") bytes so far; call again with the rest"; exit 0; }
        mv "$state/joined" "$target"
    fi
    say "target: $(wc -c < "$target") bytes"
}

install_wheels() {
    set -- "$carried"/wheels/*.whl
    [ -f "$1" ] || return 0
    "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$state/site" "$@"
    PYTHONPATH=$PYTHONPATH:$state/site
}

train() { # METHOD SECONDS SETTING...
    method=$1 most=$2
    shift 2
    step "$method" "$most" "$PYTHON" -m secondguess train --config "$root/configs/smollm2-135m-$method.yaml" \
        "target=$target" "responses=$state/answers.jsonl" "captures=$state/captures" "out=$state/$method" save_every=200 \
        "$@" ${TRAIN:-epochs=6 batch_size=16}
    [ -e "$state/$method.done" ] || { say "call again to go on training"; exit 0; }
}

evaluate() { # METHOD METHODS
    step "eval-$1" 240 "$PYTHON" -m secondguess eval "$target" --method "$2" --drafter "$state/$1/drafter" \
        --tasks "$tasks" --budget 24,48 --max-new-tokens "${NEW_TOKENS:-256}" --batch-size 64 --json "$state/eval-$1.json"
}

gather_target
install_wheels
tasks=$(echo "$carried"/tasks/*.jsonl | tr ' ' ,)
"$PYTHON" -c 'import torch; print("pipeline:", torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU here: the CPU")'
# Half of the call, then it goes on with the answers that there are: others would make the training another one.
if [ ! -e "$state/frozen" ]; then
    step answers $((seconds / 2)) "$PYTHON" -m secondguess prepare "$target" "$carried"/prompts/*.jsonl \
        --out "$state/answers.jsonl" --limit "${LIMIT:-12000}" --max-new-tokens "${NEW_TOKENS:-256}" \
        --batch-size "${BATCH:-256}" --seed 1 --refuse-overlap "$tasks" --leave-out-overlap
    "$PYTHON" - "$state/answers.jsonl" "$state/answers.safetensors" <<'PY'
import sys
from pathlib import Path

from secondguess.prepare.answers import AnswerFile
from secondguess.prepare.compact import write_answers

source, goal = map(Path, sys.argv[1:])
with AnswerFile(source) as file:
    write_answers(goal, file.answers.values())
PY
    : > "$state/frozen"
fi
train eagle3.1 $((seconds / 3))
train pr $((seconds / 2)) "warm_start=$state/eagle3.1/drafter"
evaluate eagle3.1 eagle3.1
evaluate pr pr,pr:m=0
say "all done"
