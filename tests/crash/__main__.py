"""The command line of the crash tests: faults, kills, power cuts."""

import sys

from crash.kills import main

sys.exit(main())
