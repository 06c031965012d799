#!/bin/sh
# An emulated 64-bit ARM board below build/arm: Debian 12, and the agent installed from this checkout's wheel.
#
#   board.sh root [13]     make the Debian alone, 12 or another; RELEASE=13 is the same
#   board.sh               make what is missing of it, and install the agent anew: ten minutes at first, then one
#   board.sh run CMD...    run a command there; build/arm/site has the same path on both sides, loopback is this machine's
#
# Every program there runs 10 to 20 times slower than here: it shows that something works and which bits it gives, never
# how fast it is. To begin anew: rm -rf build/arm
set -eu

cd "$(dirname "$0")/../.."
BOARD=$(pwd -P)/build/arm
[ "${1:-}" != root ] || RELEASE=${2:-${RELEASE:-12}}
case ${RELEASE:=12} in
    12) ROOT=$BOARD/root CODENAME=bookworm ;;
    13) ROOT=$BOARD/root-13 CODENAME=trixie ;;
    *) echo "arm: RELEASE=$RELEASE: Debian 12 and 13 are known" >&2 && exit 2 ;;
esac
INCLUDED=python3,python3-venv,ca-certificates,adduser,curl # Raspberry Pi OS has them
TOOLS="qemu-aarch64-static proot debootstrap"
LOG=$BOARD/log
PATH=$PATH:/usr/sbin:/sbin

say() { printf 'arm: %s\n' "$*"; }

die() {
    printf 'arm: %s\n' "$@" >&2
    exit 1
}

# Run a command without its output; if it fails, show the end of that and stop.
quietly() {
    "$@" >"$LOG" 2>&1 && return
    tail -n 20 "$LOG" >&2
    die "failed: $*"
}

may_be_root() { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

missing_tools() { for tool in $TOOLS; do command -v "$tool" >/dev/null || printf '%s ' "$tool"; done; }

get_tools() {
    missing=$(missing_tools)
    [ -n "$missing" ] || return 0
    { command -v apt-get >/dev/null && may_be_root; } ||
        die "missing: $missing" "as root: apt-get install qemu-user-static proot debootstrap"
    say "installing $missing"
    quietly as_root apt-get -q update
    quietly as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -y install --no-install-recommends qemu-user-static proot debootstrap
    missing=$(missing_tools)
    [ -z "$missing" ] || die "apt-get brought no $missing"
}

# proot gives a folder as the root of the file system and qemu another processor, neither with any privilege.
# debootstrap unmounts /dev/pts when it has done: where it is really root, that would be this machine's.
with_own_mounts() { if [ "$(id -u)" = 0 ]; then unshare --mount "$@"; else "$@"; fi; }

on_board() { (run_on_board "$@"); }

run_on_board() { # in place of this process, so that a signal to it arrives there
    exec proot -q qemu-aarch64-static -0 -r "$ROOT" -b /dev -b /proc -b /sys \
        -b "$BOARD/wheels" -b "$BOARD/dist" -b "$BOARD/site" -w / \
        /usr/bin/env -i PATH=/opt/device/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 "$@"
}

make_root() {
    [ "$(cat "$ROOT/.made" 2>/dev/null)" != "$INCLUDED" ] || return 0
    may_be_root || die "debootstrap needs root for a Debian that is not there yet: sudo -v, then again"
    say "making an arm64 Debian $RELEASE in $ROOT: five to ten minutes"
    as_root rm -rf "$ROOT"
    quietly as_root debootstrap --arch=arm64 --foreign --variant=minbase \
        --include="$INCLUDED" "$CODENAME" "$ROOT"
    [ "$(id -u)" = 0 ] || as_root chown -R "$(id -u):$(id -g)" "$ROOT"
    cp "$(command -v qemu-aarch64-static)" "$ROOT/usr/bin/"
    quietly with_own_mounts proot -q qemu-aarch64-static -0 -r "$ROOT" -b /dev -w / /usr/bin/env DEBOOTSTRAP_DIR=/debootstrap DEBIAN_FRONTEND=noninteractive \
        /bin/sh /debootstrap/debootstrap --second-stage
    if [ -L "$ROOT/proc" ]; then rm "$ROOT/proc"; fi # the first stage's, to itself
    mkdir -p "$ROOT/proc" "$ROOT/sys"
    echo "$INCLUDED" >"$ROOT/.made"
}

# The platform's tags by name: pip judges markers by this machine, so that what torch needs is listed, not resolved.
get_wheels() {
    ! cmp -s tests/arm/wheels.txt "$BOARD/wheels/.list" || return 0
    say "fetching wheels for arm64, torch among them: 125 MB"
    rm -rf "$BOARD/wheels"
    mkdir "$BOARD/wheels"
    quietly .venv/bin/python -m pip --disable-pip-version-check download -q --only-binary=:all: --no-deps \
        --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux_2_28_aarch64 \
        --python-version 3.11 -d "$BOARD/wheels" -r tests/arm/wheels.txt
    cp tests/arm/wheels.txt "$BOARD/wheels/.list"
}

install_agent() {
    rm -rf "$BOARD/dist"
    mkdir "$BOARD/dist"
    quietly .venv/bin/python -m pip --disable-pip-version-check wheel -q --no-deps -w "$BOARD/dist" .
    wheel=$(ls "$BOARD"/dist/*.whl)
    say "installing $(basename "$wheel") on the board"
    for extra in device infer; do # the second in an environment without torch, as a board has that only serves
        if [ ! -x "$ROOT/opt/$extra/bin/pip" ]; then quietly on_board python3 -m venv "/opt/$extra"; fi
        quietly on_board "/opt/$extra/bin/pip" uninstall -q -y fieldfleet
        quietly on_board "/opt/$extra/bin/pip" install -q --no-index --find-links "$BOARD/wheels" "fieldfleet[$extra] @ file://$wheel"
    done
}

mkdir -p "$BOARD/wheels" "$BOARD/dist" "$BOARD/site"
if [ "${1:-}" = run ]; then
    shift
    run_on_board "$@"
fi
[ -x .venv/bin/python ] || die "no environment yet: make setup"
get_tools
if [ "${1:-}" = root ]; then
    make_root
    exit
fi
get_wheels
make_root
install_agent
say "ready: $(on_board python -c 'import platform, torch; print(platform.machine(), "torch", torch.__version__)')"
