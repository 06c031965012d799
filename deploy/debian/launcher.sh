#!/bin/sh
# Its own Python, whatever the caller's environment says; what it starts finds nothing in the caller's folder either.
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP
export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1
# What upgrades is the last version that proved itself: one on trial does not judge itself.
version=current
if [ "$1" = upgrade ] && [ -d @HOME@/updater ]; then version=updater; fi
exec "@HOME@/$version/bin/python3" -I -m @MODULE@ "$@"
