"""Texts of graphs for snapshots: names of calls differ between versions of torch, their order does not."""

from __future__ import annotations

import re

__all__ = ["renumbered"]


def renumbered(text: str) -> str:
    """Every call's name replaced by its place among the calls; inputs keep theirs."""
    names = [match[1] for line in text.splitlines() if (match := re.match(r"(\w+) = ", line))]
    places = {name: f"%{place}" for place, name in enumerate(names)}

    def renamed(line: str) -> str:
        left, equals, right = line.partition(" = ")
        called, bracket, rest = (right if equals else left).partition("(")
        rest = re.sub(r"(?<![\w.:])[A-Za-z_]\w*(?!\w*=)", lambda m: places.get(m[0], m[0]), rest)
        return f"{places[left]} = {called}{bracket}{rest}" if equals else left

    def returned(line: str) -> str:
        return (
            re.sub(r"\w+", lambda m: places.get(m[0], m[0]), line)
            if line.startswith("return ")
            else renamed(line)
        )

    return "\n".join(map(returned, text.splitlines()))
