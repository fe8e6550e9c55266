"""Every bad input, by its number: refused by field and limit, showing neither body nor secret, with nothing written.

The number begins the name of each case (`pytest -k 03-`); `ELSEWHERE` names the tests of the rows, or parts of rows,
that need more than this folder has, and `test_table.py` sees that no number is missing.

     1-4  the idempotency key: none, blank, too long, other characters    16-20  messages that no worker can run
       7  the same key with other arguments                               21-23  results, and rows without a way out
     8-9  a key that is running; another tenant's                         28-30  settings, servers, addresses
  10, 11  arguments: the same in another spelling; not JSON                   31  replays that cannot be
  13, 14  amounts, effects, refunds                                           34  commands on a machine that lacks something

There is no HTTP edge, no incoming or outgoing webhook, no admin interface and no saga yet: 5, 6, 12, 15, 24-27, 32, 33.
"""
