"""The record of a run: its journal, checkpoints, costs, and the history of reports."""
