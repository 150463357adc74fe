"""Who starts: the launcher, the place where ranks meet, and what they print."""
