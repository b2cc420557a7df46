"""Tracing of repeated blocks: a block of layers is traced twice, however often the model repeats it.

The model's own code runs as usual, except inside a module like one that was already traced in a like call:
there, one opaque operator stands for all of it (``tracing.py``). Once the program is functional and
decomposed, the traced block's nodes are written out in its place, with the parameters of the module that was
called (``writing_out.py``). Two modules are alike if they have the same trees of submodules, classes, shapes
and other contents; numbers and names may differ as long as the traced block did not read them
(``likeness.py``). A block that one trace cannot represent is detected, and its modules are traced one by one:
the graph is the same either way."""

from tensoropt.capture.blocks.likeness import Likeness
from tensoropt.capture.blocks.tracing import TracedBlocks, Unlike
from tensoropt.capture.blocks.writing_out import write_out

__all__ = ["Likeness", "TracedBlocks", "Unlike", "write_out"]
