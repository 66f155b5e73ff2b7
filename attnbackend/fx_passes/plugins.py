"""Passes that other installed packages bring along."""

from __future__ import annotations

from importlib.metadata import entry_points

from attnbackend.fx_passes.base import GraphPass

__all__ = ["PASS_ENTRY_POINT_GROUP", "installed_passes"]

PASS_ENTRY_POINT_GROUP = "attnbackend.graph_passes"


def installed_passes() -> list[GraphPass]:
    """One pass for each entry point of the group ``attnbackend.graph_passes``, in the order of their names.

    An entry point is a `GraphPass` class, or a function without arguments that returns a pass.

    Raises:
        ImportError: an entry point cannot be loaded.
        TypeError: it gives something that is no pass.
    """
    found = []
    for point in sorted(entry_points(group=PASS_ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value)):
        where = f"entry point {point.name!r} = {point.value!r} of group {PASS_ENTRY_POINT_GROUP!r}"
        try:
            made = point.load()()
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"{where} cannot be loaded: {error}; repair or uninstall its package"
            ) from error
        if not isinstance(made, GraphPass):
            raise TypeError(
                f"{where} gives {made!r}; expected a GraphPass class, or a function returning one"
            )
        found.append(made)
    return found
