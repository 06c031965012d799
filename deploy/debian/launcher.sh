#!/bin/sh
# Its own Python, whatever the caller's environment says; what it starts finds nothing in the caller's folder either.
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP
export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1
exec @HOME@/current/bin/python3 -I -m @MODULE@ "$@"
