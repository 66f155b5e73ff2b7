"""``python -m attnbackend`` is the command ``attnbackend``."""

from __future__ import annotations

import sys

from attnbackend.cli import main

if __name__ == "__main__":
    sys.exit(main())
