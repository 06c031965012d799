"""Data sets of a device: specification, file readers, partitions, loading.

The light agent imports `shared.data.spec`, and with it this file; so nothing imported here may need torch. The registry
of sources is therefore `SOURCES` of `shared.data.sources.read`, which needs only numpy; `load` makes tensors.
"""
