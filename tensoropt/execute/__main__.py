"""The command ``torchrun --nproc-per-node N -m tensoropt.execute plan.json``, which trains a plan's model."""

import os
import sys

from tensoropt.execute.train import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo's threads may outlive their process group and abort a finished rank ("terminate called without an
    # active exception", seen in 2 of 6 jobs); everything is written, so exit without destructors.
    os._exit(code)
