"""Joining a job and leaving it."""
