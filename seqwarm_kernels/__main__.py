"""`python -m seqwarm_kernels`, the same as `seqwarm`."""

import sys

from .cli import main

sys.exit(main())
