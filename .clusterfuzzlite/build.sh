#!/usr/bin/env bash
# Builds every target that needs no GPU into $OUT, with its seeds and its options, as ClusterFuzzLite and OSS-Fuzz want them.
# Runs in any shell as well: SRC=$(dirname "$PWD") OUT=/tmp/out .clusterfuzzlite/build.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
[ -e ../fuzz/Cargo.toml ] && cd .. || cd "$SRC/seamproof"
: "${OUT:?the folder that takes the targets}"
mkdir -p "$OUT"

# A sanitizer watches the system's allocator, so the targets keep that one then.
sanitizer=${SANITIZER:-none}
[ "$sanitizer" = none ] && features=() || features=(--no-default-features)
cargo fuzz build --sanitizer "$sanitizer" --no-trace-compares "${features[@]}"
built=${CARGO_TARGET_DIR:-target}/x86_64-unknown-linux-gnu/release
for target in $(cargo fuzz list); do
    [ "$target" = cuda_differential ] && continue
    cp "$built/$target" "$OUT/"
    # What entropic schedules count takes longer than a case; how often a place was reached says little of numbers, and grows
    # the corpus by four.
    printf '[libfuzzer]\nentropic = 0\nuse_counters = 0\n' >"$OUT/$target.options"
    if [ -d "corpus/fuzz/$target" ]; then
        python3 - "corpus/fuzz/$target" "$OUT/${target}_seed_corpus.zip" <<'PYTHON'
import pathlib, sys, zipfile
folder, archive = pathlib.Path(sys.argv[1]), sys.argv[2]
with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as seeds:
    for path in sorted(folder.iterdir()):
        seeds.write(path, path.name)
PYTHON
    fi
done
