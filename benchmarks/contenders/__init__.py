"""What people would use instead of an idempotent task, each at its best documented setting.

`contender` is what the benchmarks ask of each of them, `contest` starts them and lets them take turns.
"""
