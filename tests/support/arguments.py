"""Values that make no sense for most arguments, and what an error about them must say."""

JUNK = [object(), b"x", "x", -1, 2.5, 10**30, 10**400, [], {}, True, [object()]]


def check_accepted_or_named(name, call):
    """`call` accepts each value, or raises a TypeError or ValueError that names the argument."""
    for value in JUNK:
        try:
            call(value)
        except (TypeError, ValueError) as error:
            if name not in str(error):
                raise AssertionError(f"the error about {name}={value!r} must name it, got {error!r}") from error
