"""Collectives that move values, prepared: arguments are checked, and nothing is sent yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll._arrays import conversion, objects
from pycoll._calls import (
    arguments,
    collectives,
    object_collectives,
    rooted_plans,
    rows_plan,
)
from pycoll._calls.call_plan import CallPlan
from pycoll._calls.group import SHARED_MEMORY
from pycoll._calls.preparing import Preparing, forced_text
from pycoll._calls.scheduled import ArrayPlan, BarrierPlan
from pycoll._selection.select import Choice

if TYPE_CHECKING:
    from pycoll._arrays.types import T
    from pycoll._arrays.value import Value
    from pycoll._calls.arguments import Target


class Moves(Preparing):
    """Prepares barriers and collectives that move values; a part of `Calls`."""

    def barrier(self, *, algorithm: str | None = None) -> CallPlan[None]:
        chosen = self._choose("barrier", 0, algorithm)
        text = f"{self._prefix}barrier(algorithm={chosen})"
        return BarrierPlan(self._group, text, self._route(chosen), chosen)

    def broadcast(
        self, x: T | None, root: int = 0, *, algorithm: str | None = None
    ) -> CallPlan[T | Any]:
        group, root = self._group, arguments.check_root(root, self._group.size)
        route = self._route(self._choose("broadcast", 0, algorithm))
        text = f"{self._prefix}broadcast(root={root}{forced_text(algorithm)})"
        return rooted_plans.broadcast(group, text, route, root, algorithm, x)

    def scatter(
        self, x: Any, root: int = 0, out: Any = None, *, algorithm: str | None = None
    ) -> CallPlan[Any]:
        group, root = self._group, arguments.check_root(root, self._group.size)
        route = self._route(self._choose("scatter", 0, algorithm))
        text = f"{self._prefix}scatter(root={root}{forced_text(algorithm)})"
        return rooted_plans.scatter(group, text, route, root, algorithm, x, out)

    def gather(
        self, x: Any, root: int = 0, out: Any = None, *, algorithm: str | None = None
    ) -> CallPlan[Any]:
        group, root = self._group, arguments.check_root(root, self._group.size)
        self._check_algorithm("gather", algorithm)
        is_root = group.rank == root
        value = conversion.wrap(x)
        if value is None:
            arguments.no_out(out if is_root else None)
            forced, parts = self._by_messages(algorithm), objects.dump(x)
            choice = Choice(forced or "linear")
            text = f"{self._prefix}gather(object, root={root}{forced_text(forced)})"
            return self._of_objects(
                text,
                "gather",
                algorithm,
                lambda call: object_collectives.gather(group, call, parts, choice, root),
                [parts],
                root,
            )
        chosen = self._choose("gather", value.array.nbytes, algorithm)
        target = None
        if is_root and isinstance(out, list | tuple):
            return self._moved_apart("gather", value, chosen, out, root)
        if is_root:
            target = arguments.Target(out, value, (group.size, *value.array.shape))
            target.check_overlap(value)
        offers = self._offers(algorithm, chosen, value, value.array.nbytes, target)
        return self._moved("gather", value, chosen, target, offers, root)

    def all_gather(self, x: Any, out: Any = None, *, algorithm: str | None = None) -> CallPlan[Any]:
        group = self._group
        self._check_algorithm("all_gather", algorithm)
        value = conversion.wrap(x)
        if value is None:
            if isinstance(x, list | tuple) and conversion.wrap(out) is not None:
                raise TypeError(
                    "all_gather takes this rank's value, not a list to be filled: all_gather(t) "
                    "returns them all, as one array (size, *t.shape)"
                )
            arguments.no_out(out)
            forced, parts = self._by_messages(algorithm), objects.dump(x)
            text = f"{self._prefix}all_gather(object{forced_text(forced)})"
            return self._of_objects(
                text,
                "all_gather",
                algorithm,
                lambda call: object_collectives.all_gather(group, call, parts, forced),
                [parts],
            )
        chosen = self._choose("all_gather", value.array.nbytes, algorithm)
        if isinstance(out, list | tuple):
            return self._moved_apart("all_gather", value, chosen, out)
        target = arguments.Target(out, value, (group.size, *value.array.shape))
        row = target.value.place[group.rank, ...]
        target.check_overlap(value, (row, value.place))
        offers = self._offers(algorithm, chosen, value, value.array.nbytes, target)
        return self._moved("all_gather", value, chosen, target, offers)

    def all_to_all(self, x: Any, out: Any = None, *, algorithm: str | None = None) -> CallPlan[Any]:
        group = self._group
        self._check_algorithm("all_to_all", algorithm)
        if conversion.wrap(x) is None:
            arguments.no_out(out)
            arguments.check_objects("all_to_all", x, group.size)
            forced = self._by_messages(algorithm)
            choice = Choice(forced or "pairwise")
            blocks = [objects.dump(item) for item in x]
            text = f"{self._prefix}all_to_all(object{forced_text(forced)})"
            return self._of_objects(
                text,
                "all_to_all",
                algorithm,
                lambda call: object_collectives.all_to_all(group, call, blocks, choice),
                blocks,
            )
        value = arguments.split_value("all_to_all", x, group.size)
        nbytes = value.array.nbytes // group.size
        chosen = self._choose("all_to_all", nbytes, algorithm)
        target = arguments.Target(out, value, value.array.shape)
        target.check_overlap(value, (target.value.place, value.place))
        if out is not None and conversion.overlap(target.value.place, value.place):
            # In place: rows come in before those that were there have left.
            if value.stage is not None:
                target.value.follow(value)
            else:
                value = conversion.Value(value.array.copy(), value.dtype, value.kind)
        offers = self._offers(algorithm, chosen, value, nbytes, target)
        return self._moved("all_to_all", value, chosen, target, offers)

    def _moved(
        self,
        collective: str,
        value: Value,
        chosen: Choice,
        target: Target | None,
        offers: bool,
        root: int | None = None,
    ) -> CallPlan[Any]:
        """Prepare a collective that moves an array."""
        return ArrayPlan(
            self._group,
            self._text(collective, value, chosen, root),
            self._route(chosen),
            collective,
            chosen,
            value,
            target,
            root=root or 0,
            offers=offers,
        )

    def _moved_apart(
        self,
        collective: str,
        value: Value,
        chosen: Choice,
        out: Sequence[Any],
        root: int | None = None,
    ) -> CallPlan[Any]:
        """Prepare a gather into a list of arrays; other ranks need not do that."""
        text, route = self._text(collective, value, chosen, root), self._route(chosen)
        return rows_plan.gather(self._group, text, route, collective, chosen, value, out, root or 0)

    def _text(self, collective: str, value: Value, chosen: Choice, root: int | None) -> str:
        where = "" if root is None else f"root={root}, "
        what = f"{collectives.type_text(value)}, {where}algorithm={chosen}"
        return f"{self._prefix}{collective}({what})"

    @staticmethod
    def _by_messages(algorithm: str | None) -> str | None:
        """Return which algorithm runs by messages, where the caller has named `algorithm`."""
        return None if algorithm == SHARED_MEMORY else algorithm
