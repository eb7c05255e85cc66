"""Planted faults: artifacts that are wrong on purpose, and clean ones beside them, to measure the
gauntlet."""
