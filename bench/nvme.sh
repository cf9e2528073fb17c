#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench-nvme, and between two runs of it what fio gets out of the same disk: the same bytes, 512 KiB
# requests, 64 in flight, read and written at once and one after the other.
# usage: bench/nvme.sh BUILD [DIR [MILLIONS [ROUNDS]]]
set -eu -o pipefail
build=${1:?usage: bench/nvme.sh BUILD [DIR [MILLIONS [ROUNDS]]]}
dir=${2:-bench-nvme.tmp} millions=${3:-60} rounds=${4:-15}
mib=$((millions * 12 * 1000000 / 1048576))
mkdir -p "$dir"
trap 'rm -f "$dir/fio"; rmdir "$dir" 2>/dev/null || true' EXIT

# name, options: seconds
fio_run() {
    fio --name="$1" --filename="$dir/fio" --direct=1 --bs=512k --ioengine=io_uring --iodepth=64 \
        --fdatasync=0 --end_fsync=1 --output-format=json "${@:2}" |
        python3 -c 'import json,sys
jobs = json.load(sys.stdin)["jobs"]
print("%.3f" % (max(max(j["read"]["runtime"], j["write"]["runtime"]) for j in jobs) / 1000))'
}

"$build/bench/bench-nvme" "$dir/store" "$millions" "$rounds"
fio_run fill --rw=write --size=$((2 * mib))m >/dev/null
for round in 1 2 3; do
    read=$(fio_run read --rw=read --size=${mib}m)
    write=$(fio_run write --rw=write --size=${mib}m --offset=${mib}m)
    mixed=$(fio --filename="$dir/fio" --direct=1 --bs=512k --ioengine=io_uring --iodepth=32 \
        --end_fsync=1 --output-format=json \
        --name=r --rw=read --size=${mib}m --name=w --rw=write --size=${mib}m --offset=${mib}m |
        python3 -c 'import json,sys
jobs = json.load(sys.stdin)["jobs"]
print("%.3f" % (max(max(j["read"]["runtime"], j["write"]["runtime"]) for j in jobs) / 1000))')
    echo "fio, ${mib} MiB each way: at once $mixed s; read $read s, then write $write s"
done
"$build/bench/bench-nvme" "$dir/store" "$millions" "$rounds"
