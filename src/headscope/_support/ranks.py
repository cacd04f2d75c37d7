"""The ranks of a process group: short messages through the store of torch.distributed, bytes through the group.

A message is JSON, and bytes are not unpickled: what another rank sends is data only. Messages take the way through the
store because there a rank that does not answer has a name; a collective operation only ends with a timeout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PIECE = 2**28  # bytes that are sent at a time
_SHORT, _LONG = 1e-3, 0.1  # seconds between two looks at the store
_LAST_WORDS = 3.0  # seconds in which ranks whose group has failed report so

_connections: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Ranks -> the default group, and their own group on the CPU."""


class RankError(RuntimeError):
    """A rank does not answer, or a connection between ranks has failed."""


class Ranks:
    """The ranks of a process group, or this process alone.

    Attributes:
        group: the group; None: this process alone.
        rank: the number of this process in the group.
        names: the rank of each member among all processes, by which messages call it.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """Take the ranks of a group; None: those of the default group, or this process alone without one.

        Raises:
            TypeError: it is not a group.
            ValueError: this process is not in the group.
        """
        self.group: ProcessGroup | None = None
        self.rank, self.names = 0, (0,)
        self._key = ""
        if group is None and not in_processes():
            return
        import torch.distributed as dist

        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        if group is not None and group is not outside and not isinstance(group, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"group: got {type(group).__name__}, expected a torch.distributed.ProcessGroup or None")
        if group is outside or (rank := dist.get_rank(group)) < 0:
            raise ValueError("group: this process is not one of its ranks; call it on the ranks of the group only")
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.names = rank, tuple(dist.get_process_group_ranks(self.group))

    @staticmethod
    def among(names: Sequence[int]) -> Ranks:
        """Return some of all processes, without a group: they can agree, and then ``connect``.

        Args:
            names: their ranks among all processes; this process is one of them.
        """
        import torch.distributed as dist

        ranks = Ranks.__new__(Ranks)
        ranks.group, ranks.names, ranks.rank, ranks._key = None, tuple(names), names.index(dist.get_rank()), ""
        return ranks

    @property
    def connected(self) -> bool:
        """Whether these ranks have a group of their own that ``connect`` can take again."""
        import torch.distributed as dist

        world: Any = dist.group.WORLD
        return self.names in _connections and _connections[self.names][0] is world

    def connect(self, *, again: bool) -> None:
        """Open a group of their own for tensors on the CPU; every rank calls it.

        Args:
            again: take the group that was opened before, on every rank. It stays open: torch would give a second one
                of the same ranks the same name, and with it the addresses of the first.
        """
        import torch.distributed as dist

        if not again:
            options: dict[str, Any] = {
                "timeout": _store().timeout,
                "backend": "gloo",
                "use_local_synchronization": True,
            }
            _connections[self.names] = dist.group.WORLD, dist.new_group([*self.names], **options)
        self.group = _connections[self.names][1]

    def forget(self) -> None:
        """Let the next ``connect`` open a new group: operations of this one may be unfinished."""
        _connections.pop(self.names, None)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.names)

    @property
    def device(self) -> torch.device:
        """The device of the tensors that the group's backend sends: the CPU where it can."""
        import torch.distributed as dist

        if self.group is None:
            return torch.device("cpu")
        kinds = [each.partition(":")[0] for each in dist.get_backend_config(self.group).split(",")]
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())

    # ------------------------------------------------------------ messages

    def agree(
        self,
        what: str,
        message: Mapping[str, Any],
        judge: Callable[[list[Any]], Any],
        seconds: float | None = None,
    ) -> Any:
        """Return what the first rank makes of the messages of all, in order; every rank calls it.

        Args:
            what: the operation, for errors; a rank that runs another one is an error on all.
            message: ready for JSON.
            judge: returns the result, ready for JSON. It runs on the first rank of the group only; its ``ValueError``
                is raised on all.
            seconds: wait at most so long; None, or longer than it: the group's timeout.

        Raises:
            RankError: some ranks do not answer in time; the error names them.
            ValueError: the error of ``judge``, or the ranks run different operations.
        """
        if self.size == 1:
            return judge([dict(message)])
        store = _store()
        before = f"headscope/{'.'.join(map(str, self.names))}"
        number = store.add(f"{before}/calls/{self.rank}", 1)
        self._key = key = f"{before}/{number}"
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        limit: float = store.timeout.total_seconds()
        limit = limit if seconds is None else min(seconds, limit)
        deadline = time.monotonic() + limit
        try:
            store.set(keys[self.rank], json.dumps({"what": what, "message": message}))
            if self.rank == 0:
                self._answer(what, keys, judge, deadline)
            elif not _waited([f"{key}/answer"], deadline):
                missing = [n for n, each in enumerate(keys) if not store.check([each])] or [0]
                raise self._unanswered(what, missing, limit)
            answer = json.loads(store.get(f"{key}/answer"))
        except RankError:
            raise
        except RuntimeError as error:
            raise RankError(f"{what}: the store of torch.distributed does not answer; did its process end?") from error
        if "missing" in answer:
            raise self._unanswered(what, answer["missing"], limit)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["result"]

    def _answer(self, what: str, keys: Sequence[str], judge: Callable[[list[Any]], Any], deadline: float) -> None:
        """Write the answer to the messages of all, and delete what no rank reads any more."""
        store, answer = _store(), dict[str, Any]()
        if _waited(keys, deadline):
            several = [json.loads(store.get(each)) for each in keys]
            try:
                self._check_operations(what, [each["what"] for each in several])
                answer = {"result": judge([each["message"] for each in several])}
            except ValueError as error:
                answer = {"error": f"{error}"}
        else:
            answer = {"missing": [n for n, each in enumerate(keys) if not store.check([each])]}
        store.set(f"{self._key}/answer", json.dumps(answer))
        before, _, number = self._key.rpartition("/")
        last = f"{before}/{int(number) - 1}"
        for each in (*keys, f"{last}/answer", *(f"{last}/done/{n}" for n in range(self.size))):
            store.delete_key(each)

    def _check_operations(self, what: str, got: Sequence[str]) -> None:
        """Raise ValueError if the ranks run different operations."""
        if other := next((n for n, each in enumerate(got) if each != got[0]), None):
            raise ValueError(
                f"{what}: the ranks run different operations; expected the same on all, got {got[0]} on rank "
                f"{self.names[0]} and {got[other]} on rank {self.names[other]}"
            )

    def _unanswered(self, what: str, missing: Sequence[int], seconds: float) -> RankError:
        return RankError(
            f"{what}: {self.describe(missing)} did not answer within {seconds:g} s; expected the same call on every "
            "rank of the group. A process has ended, is still busy, or did not call it"
        )

    def describe(self, ranks: Sequence[int]) -> str:
        """Return ``rank 3`` or ``ranks 3, 5`` for some members, by their numbers among all processes."""
        shown = ", ".join(str(self.names[n]) for n in ranks[:16])
        return f"rank{'' if len(ranks) == 1 else 's'} {shown}{' …' if len(ranks) > 16 else ''}"

    # ------------------------------------------------------------ bytes

    def collect(self, what: str, content: bytes, sizes: Sequence[int], to: int | None) -> list[bytes] | None:
        """Return what every rank sends, in order, on rank ``to`` (None: on all); None on the other ranks.

        Args:
            what: the operation, for errors.
            content: what this rank sends.
            sizes: the bytes of each rank, as exchanged before.
            to: a rank of the group.

        Raises:
            RankError: a rank has ended meanwhile; the error names it.
        """
        if self.group is None or self.size == 1:
            return [content]
        try:
            received = self._collect(content, sizes, to)
        except RuntimeError as error:
            raise self.failure(what, error) from error
        _store().set(f"{self._key}/done/{self.rank}", "")
        return received

    def _collect(self, content: bytes, sizes: Sequence[int], to: int | None) -> list[bytes] | None:
        import torch.distributed as dist

        if to is not None and self.rank != to:
            for piece in _tensor(content, self.device).split(_PIECE):
                dist.send(piece, group=self.group, group_dst=to)
            return None
        received: list[bytes] = []
        for rank, size in enumerate(sizes):
            if rank == self.rank and to is not None:
                received.append(content)
                continue
            mine = rank == self.rank
            buffer = _tensor(content, self.device) if mine else torch.empty(size, dtype=torch.uint8, device=self.device)
            for piece in buffer.split(_PIECE):
                if to is None:
                    self.finish(dist.broadcast(piece, group=self.group, group_src=rank, async_op=True))
                else:
                    dist.recv(piece, group=self.group, group_src=rank)
            received.append(content if mine else buffer.cpu().numpy().tobytes())
        return received

    def finish(self, work: Any) -> None:
        """Wait for a collective operation, as long as no rank reports that it has failed.

        Only the ranks that are connected to one that has ended notice at once; others would wait for the timeout.

        Raises:
            RuntimeError: it has failed; ``failure`` names the rank.
        """
        store, pause = _store(), _SHORT / 10
        now = time.monotonic()
        deadline, look = now + store.timeout.total_seconds(), now + _LONG
        while not work.is_completed():
            now = time.monotonic()
            if now > look:
                if now > deadline or store.check([f"{self._key}/failed"]):
                    raise RuntimeError("the operation did not finish on all ranks")
                if store.check([f"{self._key}/left"]):
                    deadline = min(deadline, now + _LAST_WORDS)
                look = now + _LONG
            time.sleep(pause)
            pause = min(1.5 * pause, _LONG / 10)
        work.wait()

    def leave(self) -> None:
        """State that this rank takes part in no further operation until the ranks agree again."""
        if self.size > 1:
            _store().set(f"{self._key}/left", f"{self.names[self.rank]}")

    def left(self) -> int | None:
        """Return a rank that has left, by its number among all processes."""
        store = _store()
        return int(store.get(f"{self._key}/left")) if store.check([f"{self._key}/left"]) else None

    def failure(self, what: str, error: RuntimeError) -> RankError:
        """Return the error of an operation that has failed, with the ranks that do not report the same."""
        silent = self._silent()
        who = self.describe(silent) if silent else "a rank"
        return RankError(
            f"{what}: {who} ended, failed or did not take part while the ranks exchanged data; expected every rank to "
            f"take part until all have returned ({error})"
        )

    def _silent(self) -> list[int]:
        """Return the ranks that report neither that they are done nor that the group has failed for them, too."""
        try:
            store = _store()
            for each in (f"{self._key}/failed", f"{self._key}/failed/{self.rank}"):
                store.set(each, "")
            deadline = time.monotonic() + _LAST_WORDS
            waiting = [*range(self.size)]
            while waiting and time.monotonic() < deadline:
                ends = ("failed", "done")
                waiting = [n for n in waiting if not any(store.check([f"{self._key}/{end}/{n}"]) for end in ends)]
                time.sleep(_LONG if waiting else 0)
            return waiting
        except RuntimeError:  # the store has ended with its process
            return []


def in_processes() -> bool:
    """Return whether there is a default process group; torch.distributed is not imported for this."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def all_processes() -> ProcessGroup | None:
    """Return the default process group, if it has several processes; else None."""
    if not in_processes():
        return None
    import torch.distributed as dist

    return dist.group.WORLD if dist.get_world_size() > 1 else None


def _store() -> Any:
    """Return the store by which the processes have met."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _waited(keys: Sequence[str], deadline: float) -> bool:
    """Wait for keys of the store; return whether all are there in time. The loop lets an interrupt through."""
    store, pause = _store(), _SHORT
    while not store.check([*keys]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _LONG)
    return True


def _tensor(content: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
