"""The promises of private training, one file each, examined from outside, for any library that has an adapter.

`pytest tests/conformance` examines epsilons, `pytest tests/conformance --trainer opacus` its peer. The results and
the planted bugs: README.md.
"""
