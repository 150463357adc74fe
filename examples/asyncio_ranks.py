"""Ranks that are asyncio programs: each answers questions while it waits for the others.

pycoll-run -n 4 examples/asyncio_ranks.py

Every rank runs a small service: questions come in by a queue, as they might by a socket, and are
answered with a setting that rank 0 decides. The setting changes while the services are at work:
`await comm.ibroadcast(...)` waits for it, and the event loop answers questions meanwhile.
"""

import asyncio

import pycoll

READY = 1  # tag of the messages that say: this rank has answered questions while waiting


class Service:
    """Answers questions from a queue, politely in the language of the day."""

    def __init__(self, greeting):
        self.greeting = greeting
        self.questions = asyncio.Queue()
        self.answered = 0

    async def answer(self):
        """Answer for ever: cancelled in the end."""
        while True:
            name, reply = await self.questions.get()
            self.answered += 1
            reply.set_result(f"{self.greeting}, {name}!")

    async def ask(self, name):
        """Ask and wait for the answer."""
        reply = asyncio.get_running_loop().create_future()
        await self.questions.put((name, reply))
        return await reply


async def change_greeting(comm, service):
    """Get the new greeting from rank 0, which sends it when all services have been busy."""
    new = None
    if comm.rank == 0:
        new = "hallo"
        others = range(1, comm.size)
        await asyncio.gather(*(comm.irecv(source=rank, tag=READY) for rank in others))
    service.greeting = await comm.ibroadcast(new, root=0)


async def be_curious(comm, service):
    """Ask until the new greeting comes back; how many old ones came before."""
    old = 0
    while await service.ask(f"rank {comm.rank}") == f"hello, rank {comm.rank}!":
        old += 1
        if old == 100 and comm.rank != 0:
            await comm.isend(None, dest=0, tag=READY)
    return old


async def give_up(comm):
    """Wait for a message that nobody sends, but not for ever; whether that worked."""
    request = comm.irecv()
    try:
        async with asyncio.timeout(0.05):
            await request
    except TimeoutError:
        # asyncio has stopped waiting. The receive is still there, and would take the next message.
        return request.cancel()
    return False


async def live(comm):
    """What one rank does."""
    service = Service("hello")
    answering = asyncio.create_task(service.answer())

    # Side by side: waiting for the other ranks, and for one's own service.
    _, old = await asyncio.gather(change_greeting(comm, service), be_curious(comm, service))
    gave_up = await give_up(comm)
    answering.cancel()

    # Rank 0 may have nobody to wait for; the others have answered while they waited.
    good = gave_up and old >= (100 if comm.rank else 0) and service.greeting == "hallo"
    lines = await comm.igather(f"{old} answers while waiting, {service.answered} in all", root=0)
    if comm.rank == 0:
        for rank, line in enumerate(lines):
            print(f"rank {rank}: {line}")
        print("a message that nobody sends: stopped waiting for it, took the receive back")
    if not await comm.iall_reduce(good, op="land"):
        raise SystemExit("a rank did not answer while it waited, or could not stop waiting")


if __name__ == "__main__":
    with pycoll.init() as comm:
        asyncio.run(live(comm))
