"""Contract tests loop over the library's tables: whatever is listed there is examined here.

A package, so that contracts/test_strategies.py and test_strategies.py may share a name.
"""
