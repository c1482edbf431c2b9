"""Mutation score: how many small bugs the fast tests and a short simulation notice. See __main__.py."""
