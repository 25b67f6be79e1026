"""A simulator of multi-turn rollouts that drives the router's own placement objects."""
