"""``python -m fgpuspawner.service``: what the Hub starts as its managed service."""

import sys

from fgpuspawner.service.process import main

sys.exit(main())
