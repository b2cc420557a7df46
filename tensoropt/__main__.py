"""``python -m tensoropt`` is the ``tensoropt`` command."""

import sys

from tensoropt.cli import main

sys.exit(main())
