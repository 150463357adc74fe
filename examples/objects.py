"""What is not an array travels as a Python object: here rank 0 hands out work and collects answers.

pycoll-run -n 4 examples/objects.py
"""

import pycoll

TEXT = """
Rank zero tears the text into lines
and deals them out to all;
each counts the letters in its share,
and zero merges them all.
"""

with pycoll.init() as comm:
    # A setting that everyone needs: a dict, made on rank 0 only.
    settings = {"ignore": " ,;."} if comm.rank == 0 else None
    settings = comm.broadcast(settings, root=0)

    # Scatter: a list with one item for each rank goes in, each rank gets its own item.
    shares = None
    if comm.rank == 0:
        lines = TEXT.strip().splitlines()
        shares = [lines[rank :: comm.size] for rank in range(comm.size)]
    share = comm.scatter(shares, root=0)

    letters = [c for line in share for c in line.lower() if c not in settings["ignore"]]
    answer = {
        "rank": comm.rank,
        "lines": len(share),
        "counts": {c: letters.count(c) for c in letters},
    }

    # Gather: the root gets the list of all answers by rank, the others get None.
    answers = comm.gather(answer, root=0)

    if comm.rank == 0:
        totals = {}
        for answer in answers:
            print(f"rank {answer['rank']} read {answer['lines']} lines")
            for letter, count in answer["counts"].items():
                totals[letter] = totals.get(letter, 0) + count
        letter = max(totals, key=totals.get)
        print(f"most frequent: {letter!r}, {totals[letter]} times")
