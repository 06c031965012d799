"""A device's examples: what an operator may write (`spec`), the sources (one a file), partitions, and `load`.

The light agent imports `shared.data.spec`, and Python runs this file before it; so nothing may be imported here that
needs torch. The registry of sources is therefore the literal `SOURCES` of `shared.data.sources.read`, which needs numpy
alone; `load` makes tensors of what it reads.
"""
