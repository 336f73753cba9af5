"""The tree in which the summaries of a document's parts become one."""

from __future__ import annotations


def merge_levels(num_parts: int, fan_in: int) -> list[list[range]]:
    """Return, for each level above the parts, which nodes of the level below each node merges.

    The last level is one node. Groups are of neighbours, at most `fan_in` (from 2) of them, and as
    even as can be. Without a second part there is nothing to merge.
    """
    levels: list[list[range]] = []
    below = num_parts
    while below > 1:
        groups = -(-below // fan_in)
        ends = [below * (i + 1) // groups for i in range(groups)]
        levels.append([range(*pair) for pair in zip([0, *ends], ends, strict=False)])
        below = groups
    return levels
