#!/bin/sh
# Fetches NVIDIA's MPS control daemons of Debian's non-free component and unpacks them, for tests only:
#   fetch.sh FOLDER     ->  FOLDER/535/nvidia-cuda-mps-control, FOLDER/550/nvidia-cuda-mps-control
# The archive is the one that this system's apt knows already; nothing of the system is changed.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)

# the archive of the distribution, as apt has it: deb822 files first, then one-line ones
archive() {
  cat /etc/apt/sources.list.d/*.sources 2>/dev/null | awk '$1 == "URIs:" && $2 !~ /security/ { print $2; exit }'
  cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
    awk '$1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /:\/\//) { if ($i !~ /security/) print $i; exit } }'
}

fetch() { # branch suite component
  branch=$1 suite=$2 component=$3
  [ -x "$folder/$branch/nvidia-cuda-mps-control" ] && return 0
  work=$(mktemp -d)
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/parts"
  printf 'deb %s %s %s\n' "$uri" "$suite" "$component" >"$work/list"
  set -- -o Dir::Etc::SourceList="$work/list" -o Dir::Etc::SourceParts="$work/parts" \
    -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root \
    -o Acquire::Retries=2 -o Acquire::Languages=none
  apt-get "$@" -qq update
  (cd "$work" && apt-get "$@" -qq download "nvidia-cuda-mps")
  dpkg-deb --fsys-tarfile "$work"/nvidia-cuda-mps_*.deb | tar -xf - -C "$work" ./usr
  mkdir -p "$folder/$branch.new"
  find "$work/usr" -type f \( -name nvidia-cuda-mps-control -o -name nvidia-cuda-mps-server \) \
    -exec cp {} "$folder/$branch.new/" \;
  chmod 755 "$folder/$branch.new"/*
  rm -rf "${folder:?}/$branch" "$work"
  mv "$folder/$branch.new" "$folder/$branch"
}

uri=$(archive | head -n 1)
[ -n "$uri" ] || { echo "apt has no archive configured here" >&2; exit 1; }
[ "$(dpkg --print-architecture)" = amd64 ] || { echo "only for amd64" >&2; exit 1; }
fetch 535 bookworm non-free
fetch 550 trixie non-free
