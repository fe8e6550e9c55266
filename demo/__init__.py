"""The whole system on real input: purchases, refunds, duplicates and faults, and a comparison of three ledgers."""
