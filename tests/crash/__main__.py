import sys

from crash.kills import main

sys.exit(main())
