"""`python -m cuep`."""

import sys

from cuep.cli import main

sys.exit(main())
