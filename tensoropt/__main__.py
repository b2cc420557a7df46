"""The entry point of ``python -m tensoropt``, which is the ``tensoropt`` command."""

import sys

from tensoropt.cli.parser import main

sys.exit(main())
