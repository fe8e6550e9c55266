"""Python imports this as each process begins that a test starts: it collects no garbage as it ends.

That would be a third of what importing an application and ending costs. While a process runs, it is like one of users.
"""

import atexit
import gc

atexit.register(gc.freeze)
