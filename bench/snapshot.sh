#!/bin/bash
# Packs one commit with what it compiles for a card, so that a machine elsewhere measures exactly that commit:
#   bash bench/snapshot.sh [commit] [words in block names...]     writes out/card.tar (source, library, keys)
# There:  tar -xpf out/card.tar -C /tmp && cd /tmp/card/src && bash bench/card.sh
set -eu
cd "$(dirname "$0")/.."
COMMIT=$(git rev-parse "${1:-HEAD}")
[ $# -gt 0 ] && shift
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
FOLDER=$PWD/out/card
rm -rf "$FOLDER" "$FOLDER.tar"
mkdir -p -m 700 "$FOLDER" "$FOLDER/src"
git archive "$COMMIT" | tar -x -C "$FOLDER/src"
# Files with tests for a card, the last changed first.
git grep -l "mark[.]gpu" "$COMMIT" -- 'tests/*.py' | cut -d: -f2 | while read -r file; do
    printf '%s %s\n' "$(git log -1 --format=%ct "$COMMIT" -- "$file")" "$file"
done | sort -rn | cut -d' ' -f2 > "$FOLDER/gpu-tests"
cd "$FOLDER/src"
include=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_path('include'))")
for part in _native _health; do
    gcc -O2 -shared -fPIC -DPy_LIMITED_API=0x030B0000 -I"$include" "runtime/$part.c" -o "runtime/$part.abi3.so"
done
# NODE: an autograd node built for the torch and Python of that machine (else bench/card.sh builds it there).
[ -z "${NODE:-}" ] || cp "$NODE" runtime/
ESPER_COMMIT=$COMMIT ESPER_DIRTY=0 PYTHONPATH=$PWD "$PYTHON" -m bench.prepare "$FOLDER" --target "${TARGET:-h100}" $([ $# -eq 0 ] || printf -- '--only %s ' "$@")
