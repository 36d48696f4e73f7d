"""The promises of private training, one file each, examined from outside on any library that has an adapter.

`pytest tests/conformance` examines epsilons, `pytest tests/conformance --trainer opacus` its peer. What is found, and
which planted bugs each test catches: docs/conformance.md.
"""
