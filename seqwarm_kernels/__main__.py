"""`python -m seqwarm_kernels`."""

import sys

from .cli import main

sys.exit(main())
