"""Segmentation of scratches on brushed metal."""
