"""The process that `seamproof large` asks: `python -m seamproof.large FILE[:NAME]`; it is not for people."""

from __future__ import annotations

import contextlib
import os
import sys

from .worker import main

code = main()
with contextlib.suppress(Exception):
    sys.stderr.flush()
os._exit(code)
