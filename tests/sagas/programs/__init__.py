"""Random saga programs under faults, compared with an oracle that interprets the program itself."""
