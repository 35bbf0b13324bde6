"""How a model's graph becomes code: how finely it is cut, and what like partitions share."""

from dataclasses import dataclass
from enum import StrEnum


class Sharing(StrEnum):
    """What partitions of one structure share."""

    TEMPLATES = "templates"  # one function for all: compile time does not grow with layers
    NOTHING = "partitions"  # a function and an object each
    WHOLE_GRAPH = "whole-graph"  # a function each, all in one module and one object


@dataclass(frozen=True)
class Granularity:
    """The split strategy's name (see `partition.strategies`) and the sharing."""

    strategy: str = "coarse"
    sharing: Sharing = Sharing.TEMPLATES


COARSE_TEMPLATES = Granularity()
"""What runs use: nothing is gained at run time by cutting finer."""
