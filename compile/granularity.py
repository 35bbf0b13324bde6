"""How a model's graph becomes code: how finely it is cut, and what like partitions share."""

from dataclasses import dataclass
from enum import StrEnum


class Sharing(StrEnum):
    """What partitions of one structure share."""

    TEMPLATES = "templates"  # one function for all: compile time does not grow with layers
    NOTHING = "partitions"  # a function and an object each
    KERNELS = "kernels"  # a function each, in one module that calls shared kernels
    WHOLE_GRAPH = "whole-graph"  # nothing: one module in which every node has its own code


@dataclass(frozen=True)
class Granularity:
    """The split strategy's name (see `partition.strategies`) and the sharing."""

    strategy: str = "coarse"
    sharing: Sharing = Sharing.TEMPLATES


COARSE_TEMPLATES = Granularity()
"""What runs use: nothing is gained at run time by cutting finer."""
