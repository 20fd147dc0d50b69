"""Holds accepted connections until the relay has identified their callers; the users take turns."""

import asyncio
import socket
from collections.abc import Callable


class Arrivals:
    """Waiting connections by user: at most `total`, of which at most `per_user` of each user.

    When `total` connections wait, a new one replaces the latest one of the user with the most, if its own
    user has at least two fewer. So a few users cannot keep all others out.
    """

    def __init__(self, total: int, per_user: int) -> None:
        self._total = total
        self._per_user = per_user
        self._waiting: dict[int, dict[socket.socket, asyncio.Task[None]]] = {}
        self._count = 0

    def add(self, user: int, connection: socket.socket, wait: Callable[[], asyncio.Task[None]]) -> str:
        """Adds a connection and starts its wait, whose task must call `remove`; or closes the connection.

        Returns why this or another connection was closed; "" if none was closed.
        """
        own, why = len(self._waiting.get(user, ())), ""
        if own >= self._per_user:
            connection.close()
            return f"uid {user} has {own} connections that wait for their turn, as many as a user may have"
        if self._count >= self._total:
            greediest = max(self._waiting, key=lambda one: len(self._waiting[one]))
            most = len(self._waiting[greediest])
            if most <= own + 1:
                connection.close()
                return f"{self._count} connections wait for their turn, {own} of them of uid {user}"
            self._give_way(greediest)
            why = f"uid {greediest} has {most} of {self._count + 1} connections that wait for their turn"
        self._waiting.setdefault(user, {})[connection] = wait()
        self._count += 1
        return why

    def remove(self, user: int, connection: socket.socket) -> None:
        """Removes a connection whose turn has come."""
        own = self._waiting[user]
        del own[connection]
        self._count -= 1
        if not own:
            del self._waiting[user]

    def close(self) -> None:
        """Closes all connections and ends their tasks."""
        for user in tuple(self._waiting):
            while user in self._waiting:
                self._give_way(user)

    def _give_way(self, user: int) -> None:
        connection, task = next(reversed(self._waiting[user].items()))
        self.remove(user, connection)
        task.cancel()
        connection.close()
