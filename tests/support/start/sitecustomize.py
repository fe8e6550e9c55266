"""Python imports this as each process begins that a test starts: it collects its garbage seldom, and none as it ends.

Of the 2 s of processor time that importing an application and ending takes, that is one; most tests with processes do little else.
"""

import atexit
import gc

gc.set_threshold(20_000)
atexit.register(gc.freeze)
