"""What servers and boards say of trained models: releases, their rollout, upper halves asked of the server."""
