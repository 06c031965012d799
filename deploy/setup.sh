#!/bin/sh
# Makes the checkout ready to use: a virtual environment in .venv, everything at the versions of constraints.txt,
# and mosquitto where it may be installed. Run it again at any time; it only adds what is missing.
#
#   PYTHON                  the interpreter to use, where the first suitable one on PATH is not wanted
#   FIELDFLEET_TORCH_INDEX  package index for torch alone, such as the one of your board's maker; without it x86-64
#                           machines without an NVIDIA GPU take PyTorch's own index of CPU builds where pip's has none
set -eu

cd "$(dirname "$0")/.."
HERE=$(pwd -P)
SUITABLE='import sys; sys.exit(sys.version_info < (3, 11))'
CPU_INDEX=https://download.pytorch.org/whl/cpu
LOG=$(mktemp)
REPORT=$(mktemp)
trap 'rm -f "$LOG" "$REPORT"' EXIT
trap 'exit 130' INT TERM

say() { printf 'setup: %s\n' "$*"; }

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Run a command without its output; if it fails, show the end of that and stop.
quietly() {
    "$@" >"$LOG" 2>&1 && return
    tail -n 20 "$LOG" >&2
    die "failed: $*"
}

# As above, for commands that use the network: three attempts, since links and mirrors have bad minutes.
patiently() {
    for pause in 5 20; do
        "$@" >"$LOG" 2>&1 && return
        say "no success, trying again in $pause s: $(tail -n 1 "$LOG")"
        sleep "$pause"
    done
    quietly "$@"
}

may_be_root() { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

can_apt() { command -v apt-get >/dev/null && may_be_root; }

apt_install() {
    patiently as_root apt-get -q -o Acquire::Retries=3 update
    patiently as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -y -o Acquire::Retries=3 install --no-install-recommends "$@"
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3 python3.14 python3.13 python3.12 python3.11
    fi
    for name in "$@"; do
        if path=$(command -v "$name") && "$path" -c "$SUITABLE" 2>/dev/null; then
            printf '%s\n' "$path"
            return
        fi
    done
}

# Of this place (a copied or moved environment still points to the old one) and of a Python that still works.
venv_is_sound() {
    [ -x .venv/bin/python ] && .venv/bin/python -c "$SUITABLE" 2>/dev/null &&
        head -n 2 .venv/bin/pip 2>/dev/null | grep -qF "$HERE/.venv/bin/"
}

make_venv() {
    python=$(find_python)
    [ -n "$python" ] || die "Python 3.11 or newer is needed${PYTHON:+, and PYTHON=$PYTHON is not}." \
        "Debian 12, Ubuntu 24.04 or newer: apt-get install python3 python3-venv" \
        "elsewhere: install it, then say where it is: PYTHON=/path/to/python3 make setup"
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        can_apt || die "$python lacks the venv module. As root: apt-get install $package"
        say "installing $package, which $python lacks"
        apt_install "$package"
    fi
    say "creating .venv with $("$python" -V) ($python)"
    rm -rf .venv
    quietly "$python" -m venv .venv
}

pip() { patiently .venv/bin/python -m pip --disable-pip-version-check -q "$@"; }

# Elsewhere pip's own index is right: on 64-bit ARM it has CPU builds, and an NVIDIA GPU wants the CUDA build.
wants_cpu_build() { [ "$(uname -m)" = x86_64 ] && [ ! -e /dev/nvidiactl ]; }

# Succeeds where what pip would install of torch needs no CUDA libraries; a dry run reads metadata and no wheel.
pip_offers_cpu_build() {
    patiently .venv/bin/python -m pip --disable-pip-version-check -q install --dry-run --no-deps --report "$REPORT" \
        "torch==$1"
    ! grep -qE '"(cuda|nvidia)-' "$REPORT"
}

install_packages() {
    # torch comes first and pinned. Left to the resolver it would be the newest one that the index has, mostly a build
    # for CUDA, which drags in gigabytes. The pin is met by any build of that version: where pip finds a CPU build
    # (2.13.0+cpu) beside the other it takes that.
    # --no-deps: a board maker's index has torch, but seldom what torch needs; the next step brings that.
    torch=$(sed -n 's/^torch==//p' constraints.txt)
    index=${FIELDFLEET_TORCH_INDEX:-}
    if [ -z "$index" ] && wants_cpu_build && ! pip_offers_cpu_build "$torch"; then index=$CPU_INDEX; fi
    say "installing torch $torch${index:+ from $index}"
    pip install --no-deps ${index:+--index-url "$index"} "torch==$torch"
    if grep -qsE '^Requires-Dist: (cuda|nvidia)' .venv/lib/python*/site-packages/torch-*/METADATA; then
        say "this build of torch is for CUDA and brings gigabytes; without an NVIDIA GPU stop here and" \
            "use PyTorch's CPU builds: FIELDFLEET_TORCH_INDEX=$CPU_INDEX make clean setup"
    fi
    say "installing fieldfleet and everything else it needs"
    pip install -c constraints.txt -e '.[device,server,demo,dev]'
}

has_mosquitto() { PATH="$PATH:/usr/sbin:/usr/local/sbin" command -v mosquitto >/dev/null; }

# Every demo and test starts a broker of its own. The system-wide service, which Debian's package starts and enables,
# is kept from starting and left disabled; an operator who wants it: systemctl enable --now mosquitto
install_mosquitto() {
    if has_mosquitto; then return; fi
    if ! can_apt; then
        say "no mosquitto, and no right to install it: the embedded broker will serve, more slowly"
        return
    fi
    say "installing mosquitto; its system service stays off"
    if under_systemd; then quietly as_root systemctl mask --runtime mosquitto.service; fi
    if (apt_install mosquitto); then installed=yes; else installed=; fi
    if under_systemd; then quietly as_root systemctl unmask --runtime mosquitto.service; fi
    if [ -z "$installed" ]; then
        say "no mosquitto: the embedded broker will serve, more slowly"
    elif command -v systemctl >/dev/null; then
        quietly as_root env SYSTEMD_OFFLINE=1 systemctl disable mosquitto.service
    else
        as_root service mosquitto stop >/dev/null 2>&1 || true # a container has no services at all
        quietly as_root update-rc.d mosquitto disable
    fi
}

under_systemd() { [ -d /run/systemd/system ]; }

# The Makefile asks the same question; this is for those who run the script itself.
up_to_date() {
    [ -e .venv/.ready ] && [ -z "$(find pyproject.toml constraints.txt deploy/setup.sh -newer .venv/.ready)" ]
}

venv_is_sound || make_venv
up_to_date || install_packages
install_mosquitto
touch .venv/.ready
say "ready"
