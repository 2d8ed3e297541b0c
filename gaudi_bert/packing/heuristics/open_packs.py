"""Packs that still have room, by how much room they have.

The histogram heuristics (SPFHP, LPFHP, best fit) never look at single sequences: they move whole counts of equal packs. For
every remaining room there is a stack of (count, pack), used last in, first out; that order is part of the published
algorithms, and any other gives other numbers. The rooms in use are kept sorted, so that the largest room, or the smallest
that fits, is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from gaudi_bert.packing.mixture import Mixture, Strategy, add_packs

__all__ = ["OpenPacks"]


class OpenPacks:
    """Stacks of open packs, and the mixture of those that are closed.

    Args:
        depth: most sequences per pack; a pack that has them is closed, and so is a full one.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._closed: Mixture = {}
        self._stacks: dict[int, list[tuple[int, Strategy]]] = {}
        self._rooms: list[int] = []

    def put(self, pack: Strategy, count: int, room: int) -> None:
        """Add `count` packs that have `room` tokens left."""
        if room == 0 or len(pack) == self.depth:
            add_packs(self._closed, pack, count)
            return
        stack = self._stacks.get(room)
        if stack is None:
            self._stacks[room] = [(count, pack)]
            insort(self._rooms, room)
        else:
            stack.append((count, pack))

    def most_room(self) -> int | None:
        """The largest room of any open pack."""
        return self._rooms[-1] if self._rooms else None

    def least_room(self, length: int) -> int | None:
        """The smallest room that holds `length` tokens."""
        position = bisect_left(self._rooms, length)
        return self._rooms[position] if position < len(self._rooms) else None

    def top(self, room: int) -> tuple[int, Strategy]:
        """The (count, pack) put last among those with this room."""
        return self._stacks[room][-1]

    def take(self, room: int, count: int) -> None:
        """Remove `count` of the packs at the top of the stack of this room."""
        stack = self._stacks[room]
        available, pack = stack.pop()
        if count < available:
            stack.append((available - count, pack))
        elif not stack:
            del self._stacks[room]
            del self._rooms[bisect_left(self._rooms, room)]

    def close(self) -> Mixture:
        """The mixture of all packs, open or closed."""
        for stack in self._stacks.values():
            for count, pack in stack:
                add_packs(self._closed, pack, count)
        self._stacks, self._rooms = {}, []
        return self._closed
