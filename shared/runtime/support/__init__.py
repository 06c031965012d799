"""Support table of operating systems, and installation of their wheels.

Debian packages contain the light part. `device-agent setup` and `edge-server setup` choose the heavy libraries for the
system by `table.toml`, check them against the hashes of `wheels.toml`, and unpack them beside the package.
"""
