"""``torchrun --nproc-per-node N -m tensoropt.execute plan.json``."""

import sys

from tensoropt.execute.train import main

if __name__ == "__main__":
    sys.exit(main())
