"""Graph -> graph. Each pass takes a legal module and returns a legal module that computes the same."""
