"""Parsers of what arrives from outside, tried with inputs that are drawn: each against an oracle that is written apart from it.

    make fuzz MINUTES=10        for so long, shared by the parsers; what fails is kept in tests/seeds/parsers.json

An input is a JSON value, so that it can be kept, read by people, and tried again by every `make test`.
"""
