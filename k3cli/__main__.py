"""`python -m k3cli`: the same as the command `k3`."""

from __future__ import annotations

import sys

from k3cli.main import main

sys.exit(main())
