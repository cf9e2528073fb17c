#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds, runs the tests. The last line is
# "N passed, N failed, N skipped".
set -u -o pipefail

usage() {
  cat <<'TEXT'
usage: scripts/test.sh [--torch] [--sanitize] [--clang] [--long] [-j N]

  (none)      gcc release build and its tests; needs no torch
  --torch     also what compares with torch and transformers, in an environment made once in
              the cache folder (about 6 GB) or the one whose python ZSPILL_TORCH_PYTHON names
  --sanitize  also AddressSanitizer + UndefinedBehaviorSanitizer and ThreadSanitizer builds
  --clang     also a clang build
  --long      also the soaks that take minutes (suite "long")
  -j N        compile jobs and tests at a time (default: the CPUs)

ZSPILL_TEST_DATA names the folder of inputs that are not part of the project (default: ../shared
beside the checkout); tests that need it are skipped without.
TEXT
}

torch_packages="torch transformers tokenizers numpy safetensors jinja2"
# What meson sums up by itself; the sum over all configurations comes last.
meson_noise='^(ninja: |Full log written|Ok: |Expected Fail: |Fail: |Unexpected Pass: |Skipped: '
meson_noise="$meson_noise|Timeout: |\$)"

torch=0 sanitize=0 clang=0 long=0 jobs=$(nproc)
while [ $# -gt 0 ]; do
  case $1 in
    --torch) torch=1 ;;
    --sanitize) sanitize=1 ;;
    --clang) clang=1 ;;
    --long) long=1 ;;
    -j) jobs=${2:?-j needs a number}; shift ;;
    -h | --help) usage; exit 0 ;;
    *) echo "test.sh: unknown option '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 1
. scripts/packages.sh

packages="$ZSPILL_BUILD_PACKAGES g++ libcmocka-dev python3 python3-numpy clang-format"
# mpich brings mpiexec; where another MPI is already in use, that one is taken.
command -v mpiexec >/dev/null || packages="$packages mpich"
command -v mpicc >/dev/null || packages="$packages libmpich-dev"
[ $clang = 1 ] && packages="$packages clang"
[ $torch = 1 ] && [ -z "${ZSPILL_TORCH_PYTHON:-}" ] && packages="$packages python3-venv"
# shellcheck disable=SC2086 # a list of names
install_packages $packages || exit 1

if [ -z "${ZSPILL_TEST_DATA:-}" ] && [ -d ../shared ]; then
  ZSPILL_TEST_DATA=$(cd ../shared && pwd)
fi
export ZSPILL_TEST_DATA=${ZSPILL_TEST_DATA:-}

if [ $torch = 1 ]; then
  if [ -z "${ZSPILL_TORCH_PYTHON:-}" ]; then
    # Beside the checkout's life: a fresh clone need not download it again.
    venv=${XDG_CACHE_HOME:-${HOME:-$root}/.cache}/zspill/venv-torch
    ZSPILL_TORCH_PYTHON=$venv/bin/python
    # The stamp is written last, so that an installation that was cut short is made again.
    # shellcheck disable=SC2086 # a list of names
    if [ ! -f "$venv/complete" ]; then
      echo "torch: making $venv (a download of some 2.5 GB, once)"
      rm -rf "$venv"
      if ! { mkdir -p "${venv%/*}" && python3 -m venv "$venv" &&
        "$venv/bin/pip" install -q --no-cache-dir $torch_packages &&
        touch "$venv/complete"; }; then
        echo "torch: could not make $venv (above); set ZSPILL_TORCH_PYTHON to a python that" \
          "has: $torch_packages" >&2
        exit 1
      fi
    fi
  fi
  "$ZSPILL_TORCH_PYTHON" -c 'import torch, transformers
print(f"torch: {torch.__version__}, transformers {transformers.__version__}")' || exit 1
  export ZSPILL_TORCH_PYTHON
else
  # So that a setting left over from elsewhere does not make this run need torch.
  unset ZSPILL_TORCH_PYTHON
fi

logs=()
broken=0

# run NAME TIMES "MESON OPTIONS" "TEST OPTIONS": configures, builds and tests one configuration.
# TIMES: how much longer than usual its tests may take.
run() {
  local name=$1 dir=build-test/$1 times=$2
  local -a setup test
  read -r -a setup <<<"$3"
  read -r -a test <<<"$4"
  [ $long = 1 ] || test+=(--no-suite long)
  echo "== $name"
  if [ ! -f "$dir/build.ninja" ]; then
    rm -rf "$dir"
    if ! meson setup "$dir" "${setup[@]}" >"build-test/$name.log" 2>&1; then
      cat "build-test/$name.log"
      echo "$name: could not configure (above)"
      broken=$((broken + 1))
      return
    fi
  fi
  if ! ninja -C "$dir" -j "$jobs" >"build-test/$name.log" 2>&1; then
    cat "build-test/$name.log"
    echo "$name: could not build (above)"
    broken=$((broken + 1))
    return
  fi
  rm -f "$dir/meson-logs/testlog.json"
  meson test -C "$dir" --no-rebuild --num-processes "$jobs" --timeout-multiplier "$times" \
    "${test[@]}" 2>&1 | grep -v -E "$meson_noise"
  logs+=("$name" "$dir/meson-logs/testlog.json")
}

mkdir -p build-test
run gcc 2 "" ""
# What installs the library or loads it into a Python cannot carry a sanitizer's runtime along.
own="--no-suite install --no-suite python --no-suite source"
# nvcc takes its time, and compiles the same whatever else is built with: once is enough.
[ $clang = 1 ] && CC=clang run clang 2 "-Dcuda=disabled" "$own"
if [ $sanitize = 1 ]; then
  export ASAN_OPTIONS=detect_stack_use_after_return=1:abort_on_error=0
  export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
  export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
  run asan 10 "-Dcuda=disabled -Dbuildtype=debugoptimized -Db_sanitize=address,undefined" "$own"
  run tsan 20 "-Dcuda=disabled -Dbuildtype=debugoptimized -Db_sanitize=thread" "$own"
fi

python3 scripts/count_tests.py --broken $broken "${logs[@]}"
