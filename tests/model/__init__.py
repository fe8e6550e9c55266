"""Random programs of record, outbox and dead letters against real Postgres, beside a model that is a few dictionaries.

Each rule is a transition as the pipeline makes it; the model (`expected`) says what must come of it, before the database
is asked. Holders, batches of a relay and what a person was shown are kept after their time, so that stale ones act too.
Time passes by ageing rows. After each step everything stored is compared with the model (`checks`).

The rules are grouped by who acts: `claims`, `holders`, `relays`, `upkeep`, `people`, and `ageing` for time. Each is a class on
top of the one whose transitions it also makes; `Machine` in `test_state_machine` has them all. Sagas have a machine of their
own, in `sagas`.

`STATE_MACHINE_EXAMPLES=10000 make test ARGS='-k state_machine'` runs more programs than the 20 of a usual run. What
fails is printed as a program and kept in `tests/seeds`, where the next run finds it: commit it until it is fixed.
"""
