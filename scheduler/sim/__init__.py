"""A simulator of whole RL jobs on a cluster: drives the shipped placement policies over a trace."""
