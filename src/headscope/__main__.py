"""``python -m headscope`` is the command ``headscope``."""

import sys

from headscope.cli import main

sys.exit(main())
