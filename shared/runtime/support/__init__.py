"""What a system needs to train, to serve or to run a site: which wheels fit it, and how they come onto it.

Packages bring the light part. The heavy one is chosen by `table.toml` for the very system, checked against the hashes
of `wheels.toml`, and unpacked beside the package by `device-agent setup` and `edge-server setup`.
"""
