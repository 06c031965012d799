#!/bin/sh
# Make a bare board a device of a site: install the agent from the site's gateway, join, set up, start it.
#
#     echo TOKEN | sudo sh install.sh [--infer | --no-setup] [--data FOLDER]
#
# The token is read from standard input, since others may see command lines. No answer is trusted before the root
# certificate has the SHA-256 that the token names; later downloads are verified against what the site signed.
# Running it again is safe. Exit codes: 0 success; 1 a step failed, with its remedy on standard error.
set -eu

etc=${FIELDFLEET_ETC:-/etc/fieldfleet}
state=${FIELDFLEET_STATE:-/var/lib/fieldfleet}
purpose=train
data=

say() { printf '%s\n' "$*"; }
fail() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
        --infer) purpose=infer ;;
        --no-setup) purpose= ;;
        --data)
            [ $# -gt 1 ] || fail '--data: add the folder with the examples of this board'
            data=$2
            shift
            ;;
        ff1,*) fail 'pass the token on standard input (echo TOKEN | sudo sh install.sh): others may see command lines' ;;
        *) fail "$1: unknown option; use --infer, --no-setup or --data FOLDER" ;;
    esac
    shift
done
[ "$(id -u)" = 0 ] || fail 'only root may install: run it by sudo sh'
if ! command -v dpkg >/dev/null || ! command -v apt-get >/dev/null; then
    fail 'this system is not Debian, Ubuntu or Raspberry Pi OS: install by pip, see device_agent/README.md'
fi
if ! command -v python3 >/dev/null; then
    say 'installing Python'
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 </dev/null || # standard input carries the token
        fail 'python3 cannot be installed: connect the board to its package mirror, or add python3 to its image'
fi

if [ -t 0 ]; then printf 'token: ' >&2; fi
read -r token || [ -n "${token:-}" ] || fail 'no token on standard input: create one on the gateway by edge-server enrol NAME'

work=$(mktemp -d) || fail 'no space for downloads: choose another folder, sudo TMPDIR=/FOLDER sh ...'
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
chmod 755 "$work" # for apt's own user

arch=$(dpkg --print-architecture)
# Prints the gateway's address, the package's file and version, and the number of wheels at the gateway.
found=$(python3 -I - "$work" "$arch" 3<<TOKEN <<'PYTHON'
$token
TOKEN
import base64, errno, hashlib, http.client, json, os, re, shutil, signal, ssl, sys, time, urllib.error, urllib.request

work, arch = sys.argv[1:]
python = "%d.%d" % sys.version_info[:2]
ATTEMPTS = 30  # in a row without progress
TIMEOUT_S = 60  # for an answer, or a block
MOST_S = 3600  # for the package
BLOCK, MOST_INDEX, MOST_PACKAGE = 1 << 18, 16 << 20, 1 << 30
BROKEN = (OSError, ValueError, http.client.HTTPException)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def fail(text):
    text = "".join(c if c.isprintable() else "?" for c in text[:1000])  # parts may come from a stranger
    sys.exit("install.sh: " + text)


def too_late(*_):
    raise TimeoutError("no data for %d s" % TIMEOUT_S)


if sys.version_info < (3, 10):
    fail("the system's Python is %s, but the agent needs 3.10 or later: install a newer system, or run the agent in "
         "a container, see deploy/container/README.md" % python)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGALRM, too_late)


class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None  # the gateway never redirects


def unpad(text):
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


try:
    with os.fdopen(3) as line:  # not in a command line or the environment
        form, address, root, _, secret = line.readline().strip().split(",")
    pinned, (host, _, port) = unpad(root), address.rpartition(":")
    if form != "ff1" or (len(pinned), len(unpad(secret))) != (32, 16):  # a copied line may be incomplete
        raise ValueError
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ValueError
    if not re.fullmatch(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]", host):
        raise ValueError
except ValueError:
    fail("not a complete token: copy the entire line, from ff1 to its end")
site = "https://" + address


def get(path, context, begin=0):
    request = urllib.request.Request(site + path, headers={"Range": "bytes=%d-" % begin} if begin else {})
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), Stay()]
    signal.alarm(TIMEOUT_S)
    return urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S)


def fetch(path, context, most):
    try:
        with get(path, context) as answer:
            return answer.read(most)
    except urllib.error.HTTPError as error:
        fail("%s%s: the gateway answers %s; check that its fieldfleet is not older than this script" % (site, path, error))
    except BROKEN as error:
        fail("%s%s: %s; check that the gateway is on, reachable, and runs fieldfleet-enrolment" % (site, path, error))
    finally:
        signal.alarm(0)


unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
offered = fetch("/ca.pem", unverified, 1 << 16).decode("ascii", "replace")
blocks = re.findall("-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\\s]+-----END CERTIFICATE-----", offered)
roots = []
for block in blocks:
    try:
        if hashlib.sha256(ssl.PEM_cert_to_DER_cert(block)).digest() == pinned:
            roots.append(block)
    except ValueError:
        continue
if not roots:
    fail("%s offers another CA than the token names; nothing was installed, and no secret was sent. Either the token is "
         "of another site, or somebody intercepts the connection: run `edge-server site check` on the gateway" % site)
space = "free some space, or choose another folder: sudo TMPDIR=/FOLDER sh ...; then run this again"
try:
    with open(os.path.join(work, "root.pem"), "w") as file:
        file.write(roots[0] + "\n")
except OSError as error:
    fail("%s: %s: %s" % (work, error.strerror, space))


def trust(authorities):
    """Return a TLS context that trusts the token's root, and intermediate authorities given with it."""
    context = ssl.create_default_context(cadata=authorities)
    context.verify_flags |= 0x200000  # X509_V_FLAG_NO_CHECK_TIME: this board's clock may not have been set yet
    context.verify_flags &= ~0x80000  # X509_V_FLAG_PARTIAL_CHAIN, which would trust an intermediate alone
    return context


def is_intermediate(block):
    """Check whether a certificate is an authority's that another one signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=block)
    except (OSError, ValueError):
        return False
    return any(ca["subject"] != ca["issuer"] for ca in context.get_ca_certs())


# While a site's root is replaced, the gateway sends its CA as signed by the other root; the token's root signed it too.
trusted = trust(roots[0])
intermediates = [block for block in blocks[:8] if is_intermediate(block)]
for block in intermediates if len(intermediates) > 1 else []:
    try:
        get("/ca.pem", trust(block + "\n" + roots[0])).close()
        trusted = trust(block + "\n" + roots[0])
        break
    except BROKEN:
        continue  # errors are reported below
    finally:
        signal.alarm(0)
try:
    index = json.loads(fetch("/packages/index.json", trusted, MOST_INDEX))
    manifests = [json.loads(base64.b64decode(release["manifest"])) for release in index["releases"]]
    wheels = len(index["wheels"])
    builds = [(item["serial"], item["version"], build) for item in manifests for build in item["builds"]
              if build["arch"] == arch and python in build["python"].split()]
    chosen = max(builds, key=lambda build: build[0], default=None)
    kinds = sorted({build["arch"] + " with Python " + build["python"] for item in manifests for build in item["builds"]})
    if chosen:
        version, build = str(chosen[1]), chosen[2]
        name, size, sha256 = str(build["file"]), int(build["size"]), str(build["sha256"])
except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
    fail("the gateway's index of packages cannot be read (%s); check the version of its fieldfleet" % error)
if not chosen:
    fail("the gateway has no agent for %s with Python %s (it has: %s); add one there by edge-server packages add FILE.deb"
         % (arch, python, ", ".join(kinds) or "none"))
if not re.fullmatch("[a-z0-9][A-Za-z0-9.+~_-]*[.]deb", name) or not re.fullmatch("[0-9][0-9A-Za-z.+~-]*", version):
    fail("the gateway's index names %r, which is not a package" % name)
if not 0 < size <= MOST_PACKAGE:
    fail("the gateway's index names a package of %d bytes, which is out of range" % size)
if shutil.disk_usage(work).free < size:
    fail("%s has no space for %.1f MB: %s" % (work, size / 1e6, space))

path, cause, received, attempts, end = os.path.join(work, name), "", 0, ATTEMPTS, time.monotonic() + MOST_S
print("agent %s, %.1f MB" % (version, size / 1e6), file=sys.stderr)
while received < size and attempts and time.monotonic() < end:
    attempts, pause_s = attempts - 1, 1
    try:
        with get("/packages/" + name, trusted, received) as answer, open(path, "ab" if answer.status == 206 else "wb") as file:
            while block := answer.read(BLOCK):
                file.write(block)
                signal.alarm(TIMEOUT_S)
                if file.tell() > size or time.monotonic() > end:
                    break
    except urllib.error.HTTPError as error:
        delay = error.headers.get("Retry-After") or ""
        cause, pause_s = str(error), min(60, int(delay)) if re.fullmatch("[0-9]{1,4}", delay) else 1
    except BROKEN as error:
        if getattr(error, "errno", None) in FULL:
            fail("%s: %s: %s" % (work, error.strerror, space))
        cause = str(error)
    finally:
        signal.alarm(0)
    before, received = received, os.path.getsize(path) if os.path.exists(path) else 0
    attempts = ATTEMPTS if received > before else attempts
    if received < size and attempts:
        time.sleep(pause_s)
with open(path, "ab+") as file:
    file.seek(0)
    digest = hashlib.sha256()
    while received == size and (block := file.read(BLOCK)):
        digest.update(block)
if digest.hexdigest() != sha256:
    fail("%s differs from what the site signed%s; nothing was installed: run this again, and on the gateway "
         "edge-server site check" % (name, " (%s)" % cause if cause else ""))
os.chmod(path, 0o644)
print(site, name, version, wheels)
PYTHON
) || exit 1
read -r site file version wheels <<EOT
$found
EOT

present=$(dpkg-query -W -f '${Version}' fieldfleet-agent 2>/dev/null || true)
if [ -n "$present" ] && dpkg --compare-versions "$present" ge "$(dpkg-deb -f "$work/$file" Version)"; then
    say "agent $present is installed"
else
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$work/$file" ||
        fail "apt could not install agent $version: fix its errors (sudo apt-get -f install), then run this again"
fi

# The site whose packages this board accepts as upgrades: root's file, which the agent cannot write.
put() { # write a file atomically
    if ! { mkdir -p "$etc" && cp "$1" "$etc/.$2.part" && chmod 644 "$etc/.$2.part" && mv "$etc/.$2.part" "$etc/$2"; }; then
        fail "$etc/$2 cannot be written: check whether the disk is full or read-only, then run this again"
    fi
}
if [ -f "$etc/upgrades.pem" ] && ! cmp -s "$work/root.pem" "$etc/upgrades.pem"; then
    say "$etc/upgrades.pem belonged to another site, and was replaced"
fi
put "$work/root.pem" upgrades.pem

if [ "$purpose" = infer ] && [ ! -f "$etc/agent.toml" ]; then
    printf '# Made by install.sh; yours from now on.\nstate_dir = "%s"\n\n[serve] # models from rollouts\n' "$state" \
        >"$work/agent.toml"
    put "$work/agent.toml" agent.toml
fi
if [ -n "$data" ]; then set -- --data "$data"; else set --; fi
printf '%s\n' "$token" | device-agent join --config "$etc/agent.toml" "$@" - ||
    fail 'this board has not joined: follow the message above, then run this again'

if [ -n "$purpose" ]; then
    if [ "$wheels" -gt 0 ]; then
        ca="$state/identity/current/ca.crt" # verified by joining; has the site CA too, as this root signed it
        [ -f "$ca" ] || ca="$etc/upgrades.pem"
        device-agent setup "$purpose" --index "$site/packages/wheels" --ca "$ca"
    else
        device-agent setup "$purpose"
    fi || fail "device-agent setup $purpose failed: follow its message, or run edge-server packages add-wheels on the gateway; then run this again"
fi

if [ -d /run/systemd/system ]; then
    systemctl enable --quiet fieldfleet-agent
    systemctl start fieldfleet-agent || fail 'the agent does not start: see journalctl -u fieldfleet-agent'
    say 'joined, and the agent runs: journalctl -u fieldfleet-agent'
else
    say "joined; without systemd start it by: runuser -u fieldfleet -- device-agent run --config $etc/agent.toml"
fi
