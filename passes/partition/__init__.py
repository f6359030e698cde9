"""One module for all devices -> one for each: `partition` gives a `Part` for every device of a placement."""

from llmc.passes.partition.by_device import partition
from llmc.passes.partition.part import Part, WeightShare

__all__ = ["Part", "WeightShare", "partition"]
