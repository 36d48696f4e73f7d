"""The exception tree: one base to catch, and the exit codes of the command line."""

from __future__ import annotations

import inspect
import re

import pytest

from epsilons import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, Exception) and not issubclass(value, Warning)
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_has_a_base_class_an_exit_code_and_a_docstring(name):
    error = CLASSES[name]
    assert issubclass(error, errors.EpsilonsError)
    assert error("what arrived").exit_code == (3 if issubclass(error, errors.PromiseError) else 2)
    assert error.__doc__


def test_the_tree_in_the_docstring_is_the_tree():
    drawn, path = {}, []
    for line in errors.__doc__.splitlines():
        found = re.match(r"^( {4})([│ ]*)(?:[├└]── )?([A-Z]\w+) {2,}\S", line)
        if not found:
            continue
        depth = len(found[2]) // 4 + ("── " in line)
        path[depth:] = [found[3]]
        drawn[found[3]] = path[depth - 1] if depth else "Exception"
    assert drawn == {name: error.__mro__[1].__name__ for name, error in CLASSES.items()}


def test_a_warning_of_this_package_can_be_told_from_others():
    assert issubclass(errors.EpsilonsWarning, UserWarning)
