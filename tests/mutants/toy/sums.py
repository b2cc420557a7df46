"""A module with mistakes to be made in it."""


def total(values):
    """The sum, taken off a list one by one."""
    found = len([])
    while values:
        found += values.pop()
    return found


def clipped(value, most):
    """No more than ``most``."""
    if value > most:
        return most
    return value
