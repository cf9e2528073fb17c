#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On a machine with an NVIDIA GPU: builds zspill's CUDA side and checks it there. One table; every
# row can fail; the exit code is 1 when one did.
set -u -o pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gpu-check.sh [--dir DIR] [--disk DIR] [-j N]

  --dir DIR   where it builds and writes gpu-check.txt (default: build-gpu)
  --disk DIR  on the disk that the I/O rows are about (default: that of --dir)
  -j N        compilers at a time (default: the CPUs)

Needs gcc and the CUDA toolkit (nvcc in PATH or /usr/local/cuda/bin, or NVCC) with cuBLAS and the
header of NCCL, nothing else: no meson, no network. liburing-dev, where it is installed, adds the I/O rows. Takes a few minutes.

With ZSPILL_CUDA_LIB set, that plug-in is checked and none is built; when it is the emulation,
sizes are small and speeds are not judged.
TEXT
}

dir=build-gpu disk="" jobs=$(nproc)
while [ $# -gt 0 ]; do
  case $1 in
    --dir) dir=${2:?--dir needs a directory}; shift ;;
    --disk) disk=${2:?--disk needs a directory}; shift ;;
    -j) jobs=${2:?-j needs a number}; shift ;;
    -h | --help) usage; exit 0 ;;
    *) echo "gpu-check.sh: unknown option '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$dir" && dir=$(cd "$dir" && pwd) || exit 1
disk=${disk:-$dir}
if ! disk=$(cd "$disk" && pwd); then
  echo "gpu-check.sh: --disk is not a directory" >&2
  exit 1
fi
cd "$(dirname "$0")/.." || exit 1
begin=$SECONDS

# ---- build ----

cc=${CC:-gcc}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
# The architectures of this machine's GPUs; all that zspill is built for where there is none.
archs=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d ' .' | sort -un |
  grep -E '^[0-9]+$' | xargs)
archs=${archs:-80 90 100}
cflags=(-std=c11 -O3 -D_GNU_SOURCE -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno
  -Wno-psabi -pthread -I. -Iinclude "-DZS_VERSION=\"$(cat VERSION)\"" '-DZS_LIBDIR_FROM_BIN="."')
has_header() { echo "#include <$1>" | $cc -E - >/dev/null 2>&1; }
libs=(-pthread -lm -ldl)
with_uring=0 with_aio=0
has_header liburing.h && with_uring=1 && libs+=(-luring)
has_header libaio.h && with_aio=1 && libs+=(-laio)

# compile OBJECT COMMAND...: a line of the list of what is to be compiled.
list=$dir/compile.list
: >"$list"
objects=() plugin=()
compile() {
  local object=$1
  shift
  printf '%q ' "$@" -c -o "$object" >>"$list"
  echo >>"$list"
}
object_of() { echo "$dir/$(echo "$1" | tr / -).o"; }
for source in base/*.c io/*.c device/*.c kernels/*.c offload/*.c zero/*.c; do
  case $source in
    io/uring.c) [ $with_uring = 1 ] || continue ;;
    io/uring_none.c) [ $with_uring = 0 ] || continue ;;
    io/aio.c) [ $with_aio = 1 ] || continue ;;
    io/aio_none.c) [ $with_aio = 0 ] || continue ;;
  esac
  objects+=("$(object_of "$source")")
  compile "$(object_of "$source")" "$cc" "${cflags[@]}" "$source"
done
if [ "$(uname -m)" = x86_64 ]; then
  for source in kernels/avx2/*.c; do
    objects+=("$(object_of "$source")")
    compile "$(object_of "$source")" "$cc" "${cflags[@]}" -mavx2 -mf16c -mfma "$source"
  done
fi

if [ -z "${ZSPILL_CUDA_LIB:-}" ]; then
  if [ ! -x "$nvcc" ]; then
    echo "gpu-check.sh: no nvcc ($nvcc): install the CUDA toolkit, or set NVCC to it" >&2
    exit 1
  fi
  # It may be a script that calls the one of the toolkit, so it is asked where that is.
  toolkit=$("$nvcc" --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/.* TOP=//p' | head -1)
  release=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
  build_name="CUDA $release, sm_${archs// / sm_}"
  gencode=()
  for arch in $archs; do gencode+=(-gencode "arch=compute_$arch,code=sm_$arch"); done
  gencode+=(-gencode "arch=compute_${archs##* },code=compute_${archs##* }")
  for source in device/cuda/*.c kernels/cuda/*.c zero/nccl/*.c; do
    plugin+=("$(object_of "$source")")
    compile "$(object_of "$source")" "$cc" "${cflags[@]}" -isystem "$toolkit/include" \
      "-DZS_CUDA_BUILD=\"$build_name\"" "$source"
  done
  for source in kernels/cuda/*.cu; do
    plugin+=("$(object_of "$source")")
    compile "$(object_of "$source")" "$nvcc" -O3 -std=c++17 --fmad=false -Werror all-warnings \
      -Xcompiler -fPIC,-fvisibility=hidden "${gencode[@]}" -I. -Iinclude "$source"
  done
fi

programs=()
# program NAME SOURCES AND FLAGS...
program() {
  programs+=("$cc ${cflags[*]@Q} -Itests/kernels ${*:2} $dir/libzspill.a ${libs[*]} -o $dir/$1")
}
program gpu-check bench/gpu_check.c
program bench-io bench/io.c
program check-math tests/emu/math.c
for name in adam cast reduce; do
  program "check-$name" -DCHECK_LEVEL=zs_cuda_level "tests/kernels/$name.c" tests/emu/level.c
done

fail_build() {
  echo "gpu-check.sh: could not build ($dir/build.log):" >&2
  tail -20 "$dir/build.log" >&2
  exit 1
}
each_line() { tr '\n' '\0' <"$1" | xargs -0 -P "$jobs" -I{} sh -c '{} || exit 255'; }
{
  each_line "$list" && rm -f "$dir/libzspill.a" && ar rcs "$dir/libzspill.a" "${objects[@]}" &&
    printf '%s\n' "${programs[@]}" >"$list" && each_line "$list"
} >"$dir/build.log" 2>&1 || fail_build
if [ -z "${ZSPILL_CUDA_LIB:-}" ]; then
  "$nvcc" -shared -cudart static -Xlinker --version-script=device/cuda/zspill-cuda.map \
    -Xlinker --no-undefined -o "$dir/libzspill-cuda.so" "${plugin[@]}" -lcublas \
    >>"$dir/build.log" 2>&1 || fail_build
  export ZSPILL_CUDA_LIB=$dir/libzspill-cuda.so
fi
emulated=0
[ "$("$dir/gpu-check" --build)" = emulation ] && emulated=1
built=$((SECONDS - begin))

# ---- run ----

failed=0
row() { printf '%-46s %-26s %-12s %s\n' "$@"; }
# judge NAME FOUND LIMIT STATUS
judge() {
  local good=ok
  if [ "$4" != 0 ]; then
    good=FAIL
    failed=$((failed + 1))
  fi
  row "$1" "$2" "$3" "$good"
}
# check NAME COMMAND...: what it prints is shown when it fails.
check() {
  local name=$1 start=$SECONDS status
  shift
  "$@" >"$dir/check.log" 2>&1
  status=$?
  judge "$name" "$((SECONDS - start)) s" "the host's" $status
  [ $status = 0 ] || tail -5 "$dir/check.log"
}

# The optimizer's kernels against the host's, all types, ends and alignments.
check_kernels() {
  check "Adam: bits, all types" "$dir/check-adam"
  check "casts: bits, all types" "$dir/check-cast"
  check "sums and norm: bits, all types" "$dir/check-reduce"
  check "runs, clipping, streams: bits" "$dir/check-math"
  [ $emulated = 1 ] || check "norm of a large array" "$dir/check-math" --long
}

check_speed() {
  "$dir/gpu-check"
  failed=$((failed + $?))
}

check_disk() {
  local file=$disk/.zspill-gpu-check mib=1024 speed status
  [ $emulated = 0 ] || mib=16
  if [ $with_uring = 0 ]; then
    row "io_uring" "not built: no liburing.h" "" "-"
    return
  fi
  for way in write read; do
    speed=$("$dir/bench-io" "$file" io_uring $way $mib 32 2>"$dir/check.log")
    status=$?
    judge "io_uring, $way, $mib MiB" "${speed%% *} GB/s" "works" $status
    [ $status = 0 ] || cat "$dir/check.log"
  done
  rm -f "$file"
}

{
  echo "gpu-check of $(git describe --always --dirty 2>/dev/null || cat VERSION)," \
    "$(date -u +'%F %H:%M') UTC, built in $built s"
  if [ $emulated = 0 ]; then
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max \
      --format=csv,noheader 2>/dev/null
  else
    echo "EMULATED on the CPU: no figure says anything about a GPU"
  fi
  row "check" "found" "limit" ""
  check_kernels
  check_speed
  check_disk
  echo "$((SECONDS - begin)) s, rows that failed: $failed"
  exit $((failed > 0))
} | tee "$dir/gpu-check.txt"
