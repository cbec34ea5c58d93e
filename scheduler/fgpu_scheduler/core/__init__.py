"""The pure part: no clock, no randomness, no I/O, no ids of its own.

Imports point down: planner, forecast -> placement, order, admission -> lifecycle -> model -> units.
"""
