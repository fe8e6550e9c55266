"""The whole system on real input: purchases and refunds, duplicates, faults, and three ledgers compared at the end."""
