"""``python -m dcp_rs.demo``."""

import sys

from dcp_rs.demo.run import main

sys.exit(main())
