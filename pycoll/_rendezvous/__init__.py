"""A rank's end of the meeting of all ranks: the launcher's end is `_launcher.rendezvous_server`."""
