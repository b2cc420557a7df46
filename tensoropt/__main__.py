"""``python -m tensoropt`` is the ``tensoropt`` command."""

import sys

from tensoropt.cli.parser import main

sys.exit(main())
