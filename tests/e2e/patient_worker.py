"""A worker that waits for its ranks as many times longer as its first argument says: `baton
worker` on processors too slow to give each rank a core within a second."""

from __future__ import annotations

import sys

from baton.deploy.cli.main import main
from baton.engine.ranks import loading

loading.HUNG_S *= float(sys.argv.pop(1))
sys.exit(main())
