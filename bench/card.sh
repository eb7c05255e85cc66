#!/bin/bash
# What a machine with a card does in one call, inside the unpacked tar of bench/snapshot.sh: prove what was compiled
# elsewhere, measure, run the card's tests.
#   bash bench/card.sh [folder for results]     (default: $OUT, else results beside the source)
# WHEELS: a folder of wheels for packages that are missing there. Every step has a time limit of its own, so that one
# that hangs costs nothing but itself.
set -u
cd "$(dirname "$0")/.."
HOME_OF_RUN=$(cd .. && pwd)
RESULTS=${1:-${OUT:-$HOME_OF_RUN/results}}
PYTHON=${PYTHON:-python3}
mkdir -p "$RESULTS"
exec > >(tee -a "$RESULTS/log.txt") 2>&1
export PYTHONUNBUFFERED=1
FAILED=""

step() {  # step SECONDS NAME COMMAND...
    local limit=$1 name=$2 begin=$SECONDS
    shift 2
    echo "== $name (at most $limit s)" >&2
    timeout -k 10 "$limit" "$@"
    local code=$?
    echo "== $name: exit $code after $((SECONDS - begin)) s" >&2
    [ $code -eq 0 ] || FAILED="$FAILED $name($code)"
    return $code
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
"$PYTHON" -m compileall -q esper_ir library runtime  # as an installed package is
export PYTHONDONTWRITEBYTECODE=1
if ! "$PYTHON" -c "import runtime._native" 2>/dev/null; then
    include=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_path('include'))")
    step 60 native gcc -O2 -shared -fPIC -DPy_LIMITED_API=0x030b0000 -I"$include" runtime/_native.c -o runtime/_native.abi3.so
fi
if ! "$PYTHON" -c "import sys; from runtime import node; sys.exit(not node.available())" 2>/dev/null; then
    step 120 node "$PYTHON" -m runtime build --if-possible
fi
"$PYTHON" -c "import runtime, json; print(json.dumps(runtime.doctor()))"

# Those of named blocks; the host bench says why its own are not proven.
IDS=$("$PYTHON" -c "import json, sys; print(*(k for k, v in json.load(open(sys.argv[1])).items() if not v['block'].startswith('host_')))" "$HOME_OF_RUN/compiled.json")
# With several cards (CARDS="0 1 2 3") each proves its share.
CARDS=${CARDS:-0}
set -- $IDS
prove() {  # prove CARD SHARE COUNT IDS...
    local card=$1 share=$2 count=$3 mine=""
    shift 3
    for id in "$@"; do
        [ $((share % count)) -eq 0 ] && mine="$mine $id"
        share=$((share + 1))
    done
    CUDA_VISIBLE_DEVICES=$card step "${PROVE_S:-100}" "prove on card $card" "$PYTHON" -m gauntlet.cli bench $mine \
        ${QUICK---quick} --json > "$RESULTS/verdicts-$card.json"
}
share=0
JUDGES=""
for card in $CARDS; do
    prove "$card" "$share" "$(echo $CARDS | wc -w)" "$@" &
    JUDGES="$JUDGES $!"
    share=$((share + 1))
done
wait $JUDGES
"$PYTHON" - "$RESULTS"/verdicts-*.json <<'PY'
import json, sys
for name in sys.argv[1:]:
    try:
        for v in json.load(open(name)).get("verdicts", []):
            print(v["verdict"], v["artifact_id"], f"{v['seconds']:.1f} s", v["reason"])
    except Exception as error:
        print("no verdicts:", name, error)
PY
HARNESS="$PYTHON -m bench.harness --library $HOME_OF_RUN --unproven --out $RESULTS"
step "${LOAD_S:-60}" load $HARNESS load ${ONLY:+--only "$ONLY"}
step "${HOST_S:-90}" host $HARNESS host --host-seconds 45
step "${BITS_S:-50}" bits $HARNESS bits ${ONLY:+--only "$ONLY"}
step $((${BLOCKS_S:-290} + 20)) blocks $HARNESS blocks --seconds "${BLOCKS_S:-290}" --limit "${BLOCK_S:-150}" --cards "${CARDS// /,}" ${SKIP:+--skip "$SKIP"} ${ONLY:+--only "$ONLY"}
if grep -rlq "mark.gpu" tests; then
    step "${TESTS_S:-100}" tests env ESPER_REQUIRE_GPU=1 "$PYTHON" -m pytest -m gpu -q -x -p no:cacheprovider
fi
echo "== all after $SECONDS s; failed:${FAILED:- none}"
[ -z "$FAILED" ]
