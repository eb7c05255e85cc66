#!/bin/bash
# What a machine with a card does in one call, inside the unpacked tar of bench/snapshot.sh: prove what was compiled
# elsewhere, measure, run the card's tests.
#   bash bench/card.sh [folder for results]     (default: $OUT, else results beside the source)
# A step has a limit in seconds and costs nothing when that is 0; what it found is written as it goes. They run in
# this order, with these defaults (all together 1060 s; a call that has less sets some to 0):
#   PROVE_S=100 RUNTIME_S=150 MODELS_S=150 BLOCKS_S=450 BITS_S=50 TESTS_S=160 LOAD_S=0 HOST_S=0
# CARDS="0 1": cards to use. ONLY, SKIP: words in names of blocks; implementations to leave out. SIZES, MODES: of
# blocks, comma-separated. COMPILE_S: of BLOCKS_S, for compiling the peers (default 45 %). MAX_EVERYWHERE=1:
# max-autotune at every size. PEERS: folder of what peers compiled, kept for a next call there. EXTRA: a further command
# of Python for EXTRA_S seconds, such as "-m bench.faults --help". TESTS_WIDTH=2: processes of tests a card. WHEELS: a
# folder of wheels for packages that are missing there.
set -u
cd "$(dirname "$0")/.."
HOME_OF_RUN=$(cd .. && pwd)
RESULTS=${1:-${OUT:-$HOME_OF_RUN/results}}
PYTHON=${PYTHON:-python3}
WORK=$HOME_OF_RUN/work
mkdir -p "$RESULTS" "$WORK"
exec > >(tee -a "$RESULTS/log.txt") 2>&1
export PYTHONUNBUFFERED=1
FAILED=""
CARDS=${CARDS:-0}
CARD_LIST=${CARDS// /,}

step() {  # step SECONDS NAME COMMAND...
    local limit=$1 name=$2 begin=$SECONDS
    shift 2
    [ "$limit" -gt 0 ] || return 0
    echo "== $name (at most $limit s)" >&2
    timeout -k 10 "$limit" "$@"
    local code=$?
    echo "== $name: exit $code after $((SECONDS - begin)) s" >&2
    [ $code -eq 0 ] || FAILED="$FAILED $name($code)"
    return $code
}

each() {  # each OPTION WORDS: the option before every word
    local option=$1 word
    shift
    for word in $*; do printf -- '%s %s ' "$option" "$word"; done
}

if [ -n "${WHEELS:-}" ]; then
    step 90 wheels "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$HOME_OF_RUN/site" "$WHEELS"/*.whl
    export PYTHONPATH="$HOME_OF_RUN/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
read -r ESPER_COMMIT ESPER_DIRTY < "$HOME_OF_RUN/commit" && export ESPER_COMMIT ESPER_DIRTY
export ESPER_LIBRARY="$HOME_OF_RUN/library" ESPER_KEYS="$HOME_OF_RUN/trust"

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu --format=csv
unset PYTHONDONTWRITEBYTECODE
"$PYTHON" -m compileall -q esper_ir library runtime bench  # as an installed package is
export PYTHONDONTWRITEBYTECODE=1
if ! "$PYTHON" -c "import runtime._native" 2>/dev/null; then
    include=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_path('include'))")
    step 60 native gcc -O2 -shared -fPIC -DPy_LIMITED_API=0x030b0000 -I"$include" runtime/_native.c -o runtime/_native.abi3.so
fi
if ! "$PYTHON" -c "import sys; from runtime import node; sys.exit(not node.available())" 2>/dev/null; then
    step 120 node "$PYTHON" -m runtime build --if-possible
fi
"$PYTHON" -c "import runtime, json; print(json.dumps(runtime.doctor()))"

# Each card proves its share, the blocks with little memory first. The host bench says why its own are not proven.
prove() {  # prove CARD SHARE COUNT
    local card=$1 mine
    mine=$("$PYTHON" - "$HOME_OF_RUN/compiled.json" "$2" "$3" "${ONLY:-}" <<'PY'
import json, sys
path, share, count, only = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split()
made = [(f.get("leaf_bytes", 0), k) for k, f in json.load(open(path)).items()
        if not f["block"].startswith("host_") and (not only or any(w in f["block"] for w in only))]
print(*[k for _, k in sorted(made)][share::count])
PY
    )
    [ -z "$mine" ] || CUDA_VISIBLE_DEVICES=$card step "${PROVE_S:-100}" "prove on card $card" \
        "$PYTHON" -m gauntlet.cli bench $mine ${QUICK---quick}
}
if [ "${PROVE_S:-100}" -gt 0 ]; then
    JUDGES=""
    share=0
    for card in $CARDS; do
        prove "$card" "$share" "$(echo $CARDS | wc -w)" &
        JUDGES="$JUDGES $!"
        share=$((share + 1))
    done
    wait $JUDGES
    "$PYTHON" -m library.cli ls --json > "$RESULTS/artifacts.json"
fi

# What is loaded must be proven: an artifact without a verdict is read strictly, which is another path.
if [ "${PROVE_S:-100}" -eq 0 ] && [ $((${LOAD_S:-0} + ${RUNTIME_S:-150})) -gt 0 ]; then
    (PROVE_S=60 ONLY=${LOADED:-rmsnorm_residual} && prove "${CARDS%% *}" 0 1)
fi

HARNESS="$PYTHON -m bench.harness --library $HOME_OF_RUN --unproven --out $RESULTS --cards $CARD_LIST"
HARNESS="$HARNESS $(each --only "${ONLY:-}")$(each --skip "${SKIP:-}")"
step "${LOAD_S:-0}" load $HARNESS load
step "${HOST_S:-0}" host $HARNESS host --host-seconds $((${HOST_S:-0} / 2))
step "${RUNTIME_S:-150}" runtime $HARNESS runtime --host-seconds 30
step "${MODELS_S:-150}" models $HARNESS models --models-seconds $((${MODELS_S:-150} - 15))
BLOCKS_S=${BLOCKS_S:-450}
COMPILE_S=${COMPILE_S:-$((BLOCKS_S * 45 / 100))}
step "$BLOCKS_S" blocks $HARNESS blocks --seconds $((BLOCKS_S - 20)) --compile-seconds "$COMPILE_S" \
    --limit "${BLOCK_S:-120}" --peers "${PEERS:-$WORK/peers}" ${SIZES:+--sizes "$SIZES"} ${MODES:+--modes "$MODES"} \
    ${MAX_EVERYWHERE:+--all-max}
step "${BITS_S:-50}" bits $HARNESS bits --seconds "${BITS_S:-50}"
step "${EXTRA_S:-0}" extra "$PYTHON" ${EXTRA:-}

# The newest tests first, dealt out over the cards; a card's own comes first, so that tests of two find a second.
tests() {  # tests SHARE COUNT CARD
    local others
    others=$(for other in $CARDS; do [ "$other" = "$3" ] || printf ',%s' "$other"; done)
    CUDA_VISIBLE_DEVICES=$3$others SHARD=$1/$2 SHARD_LOG=$WORK/tests-$1.jsonl ESPER_REQUIRE_GPU=1 \
        step "${TESTS_S:-160}" "tests $1" "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider -p bench.shard --tb=short \
        $(cat "$HOME_OF_RUN/gpu-tests") > "$WORK/tests-$1.txt"
}
if [ "${TESTS_S:-160}" -gt 0 ]; then
    SHARES=""
    share=0
    count=$(($(echo $CARDS | wc -w) * ${TESTS_WIDTH:-2}))
    for card in $CARDS; do
        for _ in $(seq "${TESTS_WIDTH:-2}"); do
            tests "$share" "$count" "$card" &
            SHARES="$SHARES $!"
            share=$((share + 1))
        done
    done
    wait $SHARES
    cp "$WORK"/tests-*.txt "$RESULTS"
    "$PYTHON" -m bench.shard "$WORK"/tests-*.jsonl > "$RESULTS/gpu-tests.json" || FAILED="$FAILED tests"
fi
echo "== all after $SECONDS s; failed:${FAILED:- none}"
[ -z "$FAILED" ]
