"""Requests: calls that go on while their caller computes, in the compiled core or beside it."""
