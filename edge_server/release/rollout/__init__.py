"""Rollout of releases and agent versions to a site's boards in waves."""
