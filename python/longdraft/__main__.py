"""`python -m longdraft` is the command `longdraft`."""

import sys

from ._command import main

sys.exit(main())
