"""Tracing of repeated blocks: a block of layers is traced twice, however often the model repeats it.

The model's own code runs as usual until two similar calls of alike modules are traced. Every later such call
becomes one opaque operator, which stands for the whole module (``tracing.py``). In the functional and
decomposed program, the traced block's nodes replace that operator, with the parameters of the called module
(``writing_out.py``). Two modules are alike if they have the same trees of submodules, classes, shapes and
other contents; numbers and names may differ if the traced block did not read them (``likeness.py``). If one
trace cannot represent all alike modules, these modules are traced one by one. The graph is the same either
way."""

from tensoropt.capture.blocks.likeness import Likeness
from tensoropt.capture.blocks.tracing import TracedBlocks, Unlike
from tensoropt.capture.blocks.writing_out import write_out

__all__ = ["Likeness", "TracedBlocks", "Unlike", "write_out"]
