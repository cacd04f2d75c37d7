"""``python -m headscope.cli`` is the command ``headscope``."""

from __future__ import annotations

import sys

from headscope.cli import main

sys.exit(main())
