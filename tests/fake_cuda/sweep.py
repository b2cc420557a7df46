"""Models on fake CUDA devices, in a process of their own: what their steps make, send and keep alive.

``python -m tests.fake_cuda.sweep LIBRARY`` reads cases as JSON from standard input and prints what was
seen, a line each.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path

from tests.fake_cuda.library import DEVICES, load


def main() -> None:
    """Answer all cases."""
    load(Path(sys.argv[1]), DEVICES)
    from tests.fake_cuda.kinds import KINDS
    from tests.fake_cuda.operators import cuda_operators

    with cuda_operators():
        for case in json.load(sys.stdin):
            gc.freeze()  # or collections, of which captures cause many, walk all that was imported
            try:
                seen = KINDS[case["kind"]](case)
            except Exception as error:
                seen = {"error": "".join(traceback.format_exception(error)[-6:])}
            print(json.dumps({**case, **seen}), flush=True)


if __name__ == "__main__":
    main()
