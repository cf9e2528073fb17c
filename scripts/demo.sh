#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From nothing to a trained model, on a machine that has Debian 12 and this checkout: installs
# what is missing, builds, trains a small model on this project's own documentation at ZeRO stage 3
# with states on disk, stops half-way, resumes, and shows what each stage keeps in memory.
# usage: scripts/demo.sh [STEPS]       (default 120)
set -eu -o pipefail

steps=${1:-120}
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
. scripts/packages.sh

say() { printf '\n== %s\n' "$*"; }

say "what is missing"
# shellcheck disable=SC2086 # a list of names
install_packages $ZSPILL_BUILD_PACKAGES python3

say "build"
[ -f build-demo/build.ninja ] || meson setup build-demo --buildtype=release -Dtests=false >/dev/null
ninja -C build-demo --quiet
zspill=build-demo/cli/zspill
$zspill --version

work=$(mktemp -d "$root/build-demo/demo.XXXXXX")
pid=
cleanup() {
  [ -z "$pid" ] || kill -KILL "$pid" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

# Text is taken as bytes: a vocabulary of 256 and no tokenizer.
cat README.md docs/*.md include/zspill.h >"$work/text.txt"
say "the text: $(wc -c <"$work/text.txt") bytes of documentation"

train=("$zspill" train --init scripts/demo_config.json --data "$work/text.txt" --ranks 2
  --seq-len 128 --micro-batch 4 --lr 2e-3 --seed 1)
long=("${train[@]}" --zero-stage 3 --offload-optimizer "nvme:$work/states"
  --offload-params "nvme:$work/params" --schedule cosine --warmup 10
  --steps "$steps" --save-every 20 --out "$work/model"
  --metrics "$work/metrics.jsonl" --resume)

say "train at stage 3, two ranks, parameters and states on disk; SIGINT after $((steps / 2)) steps"
: >"$work/metrics.jsonl"
"${long[@]}" &
pid=$!
while kill -0 $pid 2>/dev/null &&
  [ "$(grep -c '"loss"' "$work/metrics.jsonl")" -lt $((steps / 2)) ]; do
  sleep 0.05
done
kill -INT $pid
wait $pid
pid=
half=$(grep -c '"loss"' "$work/metrics.jsonl")
echo "stopped after step $half, exit code 0"
[ "$half" -lt "$steps" ]

say "the same command goes on from there"
"${long[@]}"

say "loss"
python3 scripts/demo_report.py loss "$work/metrics.jsonl" "$steps"

say "what a rank keeps in memory, stage by stage (states in memory, three steps each)"
for stage in 0 1 2 3; do
  "${train[@]}" --zero-stage $stage --offload-optimizer host --steps 3 \
    --out "$work/model-$stage" --metrics "$work/stage-$stage.jsonl" >/dev/null
done
python3 scripts/demo_report.py ledger "$work"/stage-[0-3].jsonl
say "done in $SECONDS s"
