"""The command `pycoll topology`: what a machine is made of, and how wide the links of hosts are.

`machine` finds sockets, caches, GPUs and network devices in a tree of /sys, `picture` shows them.
`measure` has the hosts of a job measure their links, `links` is the file of that, and `search`
finds the rings and trees whose narrowest link is widest. Nothing of the runtime imports this: a job
reads the order of hosts that stands in the file (`pycoll._selection.topology`).
"""
