#!/bin/sh
# Makes a bare board a device of a site: installs the agent from the site's gateway, joins, sets up, starts it.
#
#     echo TOKEN | sudo sh install.sh [--infer | --no-setup] [--data FOLDER]
#
# The token is read from standard input, since others may see command lines. Whoever answers is believed nothing before
# the root certificate has the SHA-256 that the token names; what comes then is compared with what the site signed for.
# The same again is no harm: what is done stays. Exit codes: 0 all is done; 1 a step failed, and its remedy is told.
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
            [ $# -gt 1 ] || fail '--data: name the folder with the examples of this board'
            data=$2
            shift
            ;;
        ff1,*) fail 'give the token on standard input (echo TOKEN | sudo sh install.sh): others may see command lines' ;;
        *) fail "$1: no such option; there are --infer, --no-setup and --data FOLDER" ;;
    esac
    shift
done
[ "$(id -u)" = 0 ] || fail 'only root may install: put sudo before sh'
if ! command -v dpkg >/dev/null || ! command -v apt-get >/dev/null; then
    fail 'this is no Debian, Ubuntu or Raspberry Pi OS: install by pip, as device_agent/README.md says'
fi
if ! command -v python3 >/dev/null; then
    say 'Python comes first'
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 </dev/null || # the token comes there
        fail 'python3 cannot be installed: connect the board to its package mirror once, or put python3 into its image'
fi

if [ -t 0 ]; then printf 'token: ' >&2; fi
read -r token || [ -n "${token:-}" ] || fail 'no token on standard input: edge-server enrol NAME, on the gateway, prints one'

work=$(mktemp -d) || fail 'there is no room for files to come: name a folder that has some, sudo TMPDIR=/FOLDER sh ...'
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
chmod 755 "$work" # for apt's own user

arch=$(dpkg --print-architecture)
# Prints the gateway's address, the package's file and version, and how many wheels the gateway has.
found=$(python3 -I - "$work" "$arch" 3<<TOKEN <<'PYTHON'
$token
TOKEN
import base64, errno, hashlib, http.client, json, os, re, shutil, signal, ssl, sys, time, urllib.error, urllib.request

work, arch = sys.argv[1:]
python = "%d.%d" % sys.version_info[:2]
ATTEMPTS = 30  # one after the other that bring nothing
PATIENCE_S = 60  # for an answer, or a block
MOST_S = 3600  # for the package
BLOCK, MOST_INDEX, MOST_PACKAGE = 1 << 18, 16 << 20, 1 << 30
BROKEN = (OSError, ValueError, http.client.HTTPException)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def fail(text):
    text = "".join(one if one.isprintable() else "?" for one in text[:1000])  # some of it a stranger may have said
    sys.exit("install.sh: " + text)


def too_late(*_):
    raise TimeoutError("nothing came for %d s" % PATIENCE_S)


if sys.version_info < (3, 10):
    fail("the system's Python is %s, older than any that the agent runs on (3.10): install a newer system, or run the "
         "agent in a container, as deploy/container/README.md says" % python)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGALRM, too_late)


class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None  # the gateway sends nobody elsewhere


def unpad(text):
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


try:
    with os.fdopen(3) as line:  # neither a command line nor an environment holds it
        form, address, root, _, secret = line.readline().strip().split(",")
    pinned, (host, _, port) = unpad(root), address.rpartition(":")
    if form != "ff1" or (len(pinned), len(unpad(secret))) != (32, 16):  # a copied line may have been cut
        raise ValueError
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ValueError
    if not re.fullmatch(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]", host):
        raise ValueError
except ValueError:
    fail("that is no token, or not all of it: copy the whole line, from ff1 to its end")
site = "https://" + address


def get(path, context, begin=0):
    asked = urllib.request.Request(site + path, headers={"Range": "bytes=%d-" % begin} if begin else {})
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), Stay()]
    signal.alarm(PATIENCE_S)
    return urllib.request.build_opener(*handlers).open(asked, timeout=PATIENCE_S)


def told(path, context, most):
    try:
        with get(path, context) as answer:
            return answer.read(most)
    except urllib.error.HTTPError as error:
        fail("%s%s: the gateway answers %s; is its fieldfleet older than this script?" % (site, path, error))
    except BROKEN as error:
        fail("%s%s: %s; is the gateway on, in this network, and its fieldfleet-enrolment running?" % (site, path, error))
    finally:
        signal.alarm(0)


anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
shown = told("/ca.pem", anybody, 1 << 16).decode("ascii", "replace")
blocks = re.findall("-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\\s]+-----END CERTIFICATE-----", shown)
own = []
for block in blocks:
    try:
        if hashlib.sha256(ssl.PEM_cert_to_DER_cert(block)).digest() == pinned:
            own.append(block)
    except ValueError:
        continue
if not own:
    fail("%s shows another CA than the token names; nothing was installed and nothing secret sent. Either the token is "
         "of another site, or somebody stands between: compare with `edge-server site check` on the gateway" % site)
room = "make room there, or name another folder: sudo TMPDIR=/FOLDER sh ...; then the same again"
try:
    with open(os.path.join(work, "root.pem"), "w") as file:
        file.write(own[0] + "\n")
except OSError as error:
    fail("%s: %s: %s" % (work, error.strerror, room))


def knowing(authorities):
    """Believe what ends at the token's root, perhaps by way of an authority that came with it."""
    made = ssl.create_default_context(cadata=authorities)
    made.verify_flags |= 0x200000  # X509_V_FLAG_NO_CHECK_TIME: this board's clock may not have been set yet
    made.verify_flags &= ~0x80000  # X509_V_FLAG_PARTIAL_CHAIN, which would believe an authority by itself
    return made


def is_between(block):
    """Tell whether a certificate is an authority's that another signed: by itself nobody believes it."""
    one = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        one.load_verify_locations(cadata=block)
    except (OSError, ValueError):
        return False
    return any(about["subject"] != about["issuer"] for about in one.get_ca_certs())


# While a site's root is replaced, the gateway shows its CA as the other root signed it; the token's root signed it too.
known = knowing(own[0])
between = [block for block in blocks[:8] if is_between(block)]
for block in between if len(between) > 1 else []:
    try:
        get("/ca.pem", knowing(block + "\n" + own[0])).close()
        known = knowing(block + "\n" + own[0])
        break
    except BROKEN:
        continue  # what is wrong is told below
    finally:
        signal.alarm(0)
try:
    index = json.loads(told("/packages/index.json", known, MOST_INDEX))
    manifests = [json.loads(base64.b64decode(one["manifest"])) for one in index["releases"]]
    wheels = len(index["wheels"])
    builds = [(one["serial"], one["version"], build) for one in manifests for build in one["builds"]
              if build["arch"] == arch and python in build["python"].split()]
    chosen = max(builds, key=lambda one: one[0], default=None)
    kinds = sorted({build["arch"] + " with Python " + build["python"] for one in manifests for build in one["builds"]})
    if chosen:
        version, build = str(chosen[1]), chosen[2]
        name, size, sha256 = str(build["file"]), int(build["size"]), str(build["sha256"])
except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
    fail("the gateway's index of packages cannot be read (%s); is its fieldfleet of another version?" % error)
if not chosen:
    fail("the gateway has no agent for %s with Python %s (it has: %s); there: edge-server packages add FILE.deb"
         % (arch, python, ", ".join(kinds) or "none"))
if not re.fullmatch("[a-z0-9][A-Za-z0-9.+~_-]*[.]deb", name) or not re.fullmatch("[0-9][0-9A-Za-z.+~-]*", version):
    fail("the gateway's index names %r, which is no package" % name)
if not 0 < size <= MOST_PACKAGE:
    fail("the gateway's index names a package of %d bytes, which is none" % size)
if shutil.disk_usage(work).free < size:
    fail("%s has no room for %.1f MB: %s" % (work, size / 1e6, room))

path, cause, had, left, end = os.path.join(work, name), "", 0, ATTEMPTS, time.monotonic() + MOST_S
print("agent %s, %.1f MB" % (version, size / 1e6), file=sys.stderr)
while had < size and left and time.monotonic() < end:
    left, pause_s = left - 1, 1
    try:
        with get("/packages/" + name, known, had) as answer, open(path, "ab" if answer.status == 206 else "wb") as file:
            while block := answer.read(BLOCK):
                file.write(block)
                signal.alarm(PATIENCE_S)
                if file.tell() > size or time.monotonic() > end:
                    break
    except urllib.error.HTTPError as error:
        asked = error.headers.get("Retry-After") or ""
        cause, pause_s = str(error), min(60, int(asked)) if re.fullmatch("[0-9]{1,4}", asked) else 1
    except BROKEN as error:
        if getattr(error, "errno", None) in FULL:
            fail("%s: %s: %s" % (work, error.strerror, room))
        cause = str(error)
    finally:
        signal.alarm(0)
    before, had = had, os.path.getsize(path) if os.path.exists(path) else 0
    left = ATTEMPTS if had > before else left
    if had < size and left:
        time.sleep(pause_s)
with open(path, "ab+") as file:
    file.seek(0)
    digest = hashlib.sha256()
    while had == size and (block := file.read(BLOCK)):
        digest.update(block)
if digest.hexdigest() != sha256:
    fail("%s did not come as the site signed it%s; nothing was installed: the same again, and on the gateway "
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
        fail "apt could not install agent $version: mend what it says (sudo apt-get -f install), then the same again"
fi

# Of whose packages this board installs upgrades: root's file, which the agent cannot write.
put() { # a file's new content at its place, whole or not at all
    if ! { mkdir -p "$etc" && cp "$1" "$etc/.$2.part" && chmod 644 "$etc/.$2.part" && mv "$etc/.$2.part" "$etc/$2"; }; then
        fail "$etc/$2 cannot be written: is the disk full, or read-only? Mend that, then the same again"
    fi
}
if [ -f "$etc/upgrades.pem" ] && ! cmp -s "$work/root.pem" "$etc/upgrades.pem"; then
    say "$etc/upgrades.pem was of another site, and is this one's now"
fi
put "$work/root.pem" upgrades.pem

if [ "$purpose" = infer ] && [ ! -f "$etc/agent.toml" ]; then
    printf '# Made by install.sh; yours from now on.\nstate_dir = "%s"\n\n[serve] # models that rollouts bring\n' "$state" \
        >"$work/agent.toml"
    put "$work/agent.toml" agent.toml
fi
if [ -n "$data" ]; then set -- --data "$data"; else set --; fi
printf '%s\n' "$token" | device-agent join --config "$etc/agent.toml" "$@" - ||
    fail 'this board has not joined: do what the line above says, then the same again'

if [ -n "$purpose" ]; then
    if [ "$wheels" -gt 0 ]; then
        ca="$state/identity/current/ca.crt" # verified by joining; has the site CA too, as this root signed it
        [ -f "$ca" ] || ca="$etc/upgrades.pem"
        device-agent setup "$purpose" --index "$site/packages/wheels" --ca "$ca"
    else
        device-agent setup "$purpose"
    fi || fail "device-agent setup $purpose did not end well: do what it says, or on the gateway edge-server packages add-wheels; then the same again"
fi

if [ -d /run/systemd/system ]; then
    systemctl enable --quiet fieldfleet-agent
    systemctl start fieldfleet-agent || fail 'the agent does not start: journalctl -u fieldfleet-agent says why'
    say 'joined, and the agent runs: journalctl -u fieldfleet-agent'
else
    say "joined; without systemd start it by: runuser -u fieldfleet -- device-agent run --config $etc/agent.toml"
fi
