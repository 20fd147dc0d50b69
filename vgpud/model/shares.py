"""Divides a server's bounded resources (connections, calls in progress, watches) fairly among users."""

from collections import Counter


class Shares:
    """Counts units in use. At most `total` units are in use at a time, and at most `per_user` of them by one
    user. Root has no limit of its own, and may take a unit while fewer than `total` + `for_root` are in use.
    """

    def __init__(self, total: int, per_user: int, for_root: int, root: int = 0) -> None:
        self.root = root
        self._total = total
        self._per_user = per_user
        self._for_root = for_root
        self._taken: Counter[int] = Counter()
        self._all = 0

    @property
    def taken(self) -> int:
        return self._all

    def taken_by(self, user: int) -> int:
        return self._taken[user]

    def take(self, user: int) -> bool:
        """Takes a unit for this user, which must give it back later. Returns False if no unit is
        available.
        """
        if user == self.root:
            room = self._all < self._total + self._for_root
        else:
            room = self._all < self._total and self._taken[user] < self._per_user
        if room:
            self._all += 1
            self._taken[user] += 1
        return room

    def give_back(self, user: int) -> None:
        self._all -= 1
        self._taken[user] -= 1
        if not self._taken[user]:
            del self._taken[user]

    def pass_on(self, user: int, other: int) -> bool:
        """Counts a unit of `user` as one of `other`. Returns False if `other` can have no more; the unit then
        stays with `user`.
        """
        self.give_back(user)
        passed = self.take(other)
        if not passed:
            self.take(user)
        return passed
