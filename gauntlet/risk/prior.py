"""The score before there are enough outcomes for a model: a Beta prior by group.

A group is a class of operator with the stages that were passed. Its rate is drawn towards the rate of all
outcomes as if STRENGTH more had ended like these. Planted faults never count here: only use in the field
does.
"""

from __future__ import annotations

from gauntlet.confidence import Evidence
from gauntlet.statistics import wilson

STRENGTH = 20.0


def rate(group: Evidence, every: Evidence) -> tuple[float, float, float]:
    """Mean and 90 % interval (Wilson's, over real and added outcomes) of a group's rate of failures. The
    rate of all has Jeffreys' prior."""
    base = (every.failures + 0.5) / (every.outcomes + 1)
    count, failures = group.outcomes + STRENGTH, group.failures + STRENGTH * base
    return failures / count, *wilson(failures, count)
