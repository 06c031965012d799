"""Trained models as files that others run: exports, and releases that are kept and never change."""
