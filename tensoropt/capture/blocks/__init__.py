"""Tracing of repeated blocks: a block of layers is traced twice, however often the model repeats it.

An export takes some milliseconds for each call in the model's code, and repeats them for each of a hundred
equal layers. Here the model's own code runs as usual, except inside a module whose like was already traced
under like calls: there, one opaque operator stands for all of it (``tracing.py``). Once the program is
functional and decomposed, the traced block's nodes are written out in its place, with the parameters of the
module that was called (``writing_out.py``).

Two modules are alike if they have the same trees of submodules, classes, shapes of parameters and buffers,
and other contents (``likeness.py``). Numbers, flags and names may differ (a layer's index) as long as the
traced block did not read them. A block that one trace cannot represent is detected and ends the attempt, and
its modules are then traced one by one: a block that sets attributes, changes its inputs or buffers, returns
views of its inputs, reads tensors that it was not given, or contains tensors that are read outside it. Of
alike calls the first two are both traced and must compute the same, which reveals anything that is counted
elsewhere (in a global). The graph is the same either way and only found sooner; if a block is given a tensor
that was changed in place before, views of it may come earlier among the operators.
"""

from tensoropt.capture.blocks.likeness import Likeness
from tensoropt.capture.blocks.tracing import TracedBlocks, Unlike
from tensoropt.capture.blocks.writing_out import write_out

__all__ = ["Likeness", "TracedBlocks", "Unlike", "write_out"]
