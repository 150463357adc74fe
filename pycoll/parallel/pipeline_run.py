"""Run a pipeline schedule on a communicator: computing never waits for messages of others.

Receives are posted ahead, and messages leave while the rank computes on: it waits for what its next
action needs, and for a message to leave only if more than `behind` have not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll._support.checks import check_comm
from pycoll._support.public_edge import edge, mark_users
from pycoll.parallel.pipeline import Action, PipelineSchedule, messages
from pycoll.parallel.pipeline_proof import prove_pipeline

if TYPE_CHECKING:
    from pycoll import Communicator, Request


class TimedAction(NamedTuple):
    """An action, and when it computed, in seconds."""

    action: Action
    start: float
    end: float


class PipelineRun(NamedTuple):
    """What a rank did: see `run_pipeline`."""

    outputs: list[Any]
    times: list[TimedAction]


@edge
def run_pipeline(
    comm: Communicator,
    schedule: str | PipelineSchedule,
    micro_batches: int,
    forward: Callable[[Action, Any], tuple[Any, Any]],
    backward: Callable[[Action, Any, Any], Any],
    weights: Callable[[Action, Any, Any], None] | None = None,
    *,
    chunks: int = 1,
    ahead: int = 2,
    behind: int = 2,
) -> PipelineRun:
    """Run the forwards and backwards of one batch; collective over `comm`.

    Chunk c of rank r is stage ``c * comm.size + r``. All ranks pass the same schedule and numbers,
    and send nothing else on `comm` meanwhile. The schedule is proved first, once. Messages are
    whatever `Communicator.isend` takes, NumPy arrays or PyTorch tensors for example, of any shapes
    and dtypes. An array that a function returned must not be changed before the call returns; one
    that it was passed is its own.

    Args:
        comm: the ranks of the pipeline, in their order.
        schedule, micro_batches, chunks: as for `prove_pipeline`.
        forward: ``forward(action, x) -> (y, saved)``; x is what the stage before returned as y,
            None in the first stage.
        backward: ``backward(action, saved, dy) -> dx``, the gradient of x. dy is that of y, None in
            the last stage; what the first stage returns is dropped.
        weights: ``weights(action, saved, dy)`` adds to the gradients of weights; saved may have got
            from `backward` what it needs. In a schedule without W it is called right after that.
            None: `backward` does it.
        ahead: how many receives are posted ahead; each may hold a message.
        behind: how many messages may not have left while the rank computes on.

    Returns:
        outputs: by micro-batch the y of the last stage; empty on other ranks.
        times: when each action computed, in seconds since the call.

    Raises:
        ProofError: the schedule is wrong; nothing was sent.
        TypeError, ValueError: there is no such schedule, or none for these numbers; or it has W,
            and no `weights` is given.
        PeerFailed, OperationTimeout: as of any message. What others have sent is still on its way
            then: go on with another communicator.
    """
    check_comm(comm)
    proof = prove_pipeline(schedule, comm.size, micro_batches, chunks, ahead=ahead, behind=behind)
    program = proof.programs[comm.rank]
    split = any(action.kind == "W" for action in program)
    if split and weights is None:
        raise ValueError("this schedule computes gradients of weights (W) apart: pass weights=")
    for function in (forward, backward, *(() if weights is None else (weights,))):
        if not callable(function):
            raise TypeError(f"{function!r} cannot be called: forward, backward and weights can")
    coming = deque(into for a in program if (into := messages(a, comm.rank, comm.size, chunks)[0]))
    arriving: deque[Request[Any]] = deque()
    leaving: deque[Request[None]] = deque()
    saved: dict[tuple[int, int], tuple[Any, Any]] = {}
    outputs: dict[int, Any] = {}
    times: list[TimedAction] = []

    def post() -> None:
        while coming and len(arriving) < ahead:
            message = coming.popleft()
            arriving.append(comm.irecv(message.source, message.tag(chunks)))

    def compute(action: Action, value: Any) -> Any:
        of = action[1:]
        if action.kind == "F":
            pair: Any = forward(action, value)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"forward returned a {type(pair).__name__}, not (y, saved)")
            saved[of] = pair[1], None
            return pair[0]
        kept, gradient = saved.pop(of)
        if action.kind == "B":
            result, gradient = backward(action, kept, value), value
            if split:
                saved[of] = kept, gradient
        if weights is not None and (action.kind == "W" or not split):
            weights(action, kept, gradient)
        return result if action.kind == "B" else None

    began = time.perf_counter()
    for action in program:
        into, out = messages(action, comm.rank, comm.size, chunks)
        post()
        value = arriving.popleft().wait() if into else None
        post()
        start = time.perf_counter()
        try:
            value = compute(action, value)
        except Exception as exc:
            mark_users(exc, f"rank {comm.rank} computed {action} of the pipeline")
            raise
        times.append(TimedAction(action, start - began, time.perf_counter() - began))
        if out:
            while len(leaving) >= behind:
                leaving.popleft().wait()
            leaving.append(comm.isend(value, out.dest, out.tag(chunks)))
        elif action.kind == "F":
            outputs[action.micro_batch] = value
    for request in leaving:
        request.wait()
    return PipelineRun([outputs[i] for i in sorted(outputs)], times)
