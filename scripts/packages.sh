# SPDX-License-Identifier: Apache-2.0
# Sourced by test.sh and demo.sh: what zspill needs from Debian, installed only where it is missing.

ZSPILL_BUILD_PACKAGES="gcc libc6-dev meson ninja-build pkg-config liburing-dev libaio-dev
  libjansson-dev libopenblas-dev"

# install_packages NAME...: apt-get install for those that dpkg does not know as installed.
install_packages() {
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    echo "packages: this is not Debian, so nothing is installed; needed are the likes of: $*"
    return 0
  fi
  local missing="" name
  for name in "$@"; do
    dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' ||
      missing="$missing $name"
  done
  if [ -z "$missing" ]; then
    return 0
  fi
  local sudo=""
  if [ "$(id -u)" != 0 ]; then
    if ! sudo=$(command -v sudo); then
      echo "packages: missing and neither root nor sudo to install them. As root run:" >&2
      echo "  apt-get install$missing" >&2
      return 1
    fi
  fi
  echo "packages: installing$missing"
  local log
  log=$(mktemp)
  # shellcheck disable=SC2086 # a list of names
  if $sudo apt-get update -q >"$log" 2>&1 &&
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -q -y --no-install-recommends $missing \
      >>"$log" 2>&1; then
    rm -f "$log"
    return 0
  fi
  tail -n 20 "$log" >&2
  rm -f "$log"
  echo "packages: apt-get failed (above); install by hand:$missing" >&2
  return 1
}
