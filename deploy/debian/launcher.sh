#!/bin/sh
# Its own libraries, whatever the caller's environment says; what it starts finds nothing in the caller's folder either.
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP
export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1
# The last version that proved itself does upgrades: one on trial does not judge itself.
version=current
if [ "$1" = upgrade ] && [ -d @HOME@/updater ]; then version=updater; fi
home=@HOME@/$version
# An upgrade of the system may have brought a Python that this version does not know.
python=$(readlink -f /usr/bin/python3)
if [ ! -d "$home/lib/${python##*/}" ]; then
    printf '%s\n' "@COMMAND@: the system's Python is ${python:-missing}, and this version is for Python @FIRST@ to @LAST@." \
        "Install a newer @PACKAGE@; settings, identity and everything in @STATE@ stay as they are." >&2
    exit 2
fi
exec "$home/bin/python3" -I -m @MODULE@ "$@"
